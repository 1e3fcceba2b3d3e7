"""The ``hvd-adaptive`` command.  Importing it needs neither a framework nor Horovod."""
