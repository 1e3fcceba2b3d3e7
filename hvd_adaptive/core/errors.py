"""The errors that users see.  Every message says what to do next."""


class HvdAdaptiveError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigurationError(HvdAdaptiveError, ValueError):
    """A setting is wrong; the message names it and what would be accepted."""


class MessageError(HvdAdaptiveError, ValueError):
    """A wire message is truncated, corrupt or of another version."""


class UnknownTensorError(HvdAdaptiveError, LookupError):
    """A gradient belongs to no parameter that the compressor was given."""


class SettingsMismatchError(HvdAdaptiveError, RuntimeError):
    """The ranks were given different settings."""


class MissingDependencyError(HvdAdaptiveError, ImportError):
    """A framework or Horovod is needed here and is not installed."""
