"""The benchmark: shardstream beside what users have today, and beside what the machine can do at all.

Every measurement is a *case*: one *subject* (a reader of ours, a peer, or a limit) run in a fresh process. Cases of a
suite are run in turn, repetition by repetition, so that a change of the machine's mood meets all of them alike.

    python -m tools.bench prepare         data, manifests, and each peer's own format
    python -m tools.bench throughput      samples/s; and so on, see --help
    python -m tools.bench report          one table of ratios, as text, Markdown, JSON and a plot
"""
