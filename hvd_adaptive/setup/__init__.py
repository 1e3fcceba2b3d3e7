"""Set-up: a virtual environment with pinned frameworks, and Horovod built against them.

Only the standard library is imported here, so that a bare Python can start from nothing with
``python3 -m hvd_adaptive.setup``.

- :mod:`.machine`   what the machine must offer, and the sentence that says what is missing
- :mod:`.command`   run a program into a log, and turn its failure into a sentence
- :mod:`.horovod`   the builder: the released source, three edits, a wheel kept in the user's cache
- :mod:`.allreduce` the proof: two processes under horovodrun agree on a sum
- :mod:`.venv`      the ``.venv`` of a checkout, trusted only once its stamp is written
"""
