"""What frameworks need to be told: where they are, what to divide by, and not to split the data again.

Nothing here imports a framework before it is used; each has a page in ``docs/frameworks``.
"""
