"""The two errors a user can meet."""


class UserError(Exception):
    """Something the user can put right: one sentence that says what to do."""


class ClientError(RuntimeError):
    """A client's work failed; the message names the client and its work."""
