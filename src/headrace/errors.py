"""The two ways in which a command ends badly, apart from bugs."""


class UserError(Exception):
    """The command or the configuration is wrong: one sentence that says what, where and what to do. Exit status 2."""


class RunFailed(RuntimeError):
    """The run could not go on; what it left can be resumed. Exit status 1."""
