"""Communication-efficient convex solvers: accelerated error compensation and its rivals.

Needs SciPy and scikit-learn (``pip install hvd-adaptive[solvers]``); neither a framework nor
Horovod is needed to run workers inside one process.
"""
