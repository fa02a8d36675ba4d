"""What a caller of a role in another process gets if the role fails."""

from __future__ import annotations

from gcore.types import UserError


class RoleError(RuntimeError):
    """A role raised an exception. `traceback`: the first one. `user_error`: the user can fix it. `kind`: name of the
    exception's class, for callers that handle it."""

    def __init__(self, role: str, message: str, traceback: str, user_error: bool = False, kind: str = ""):
        super().__init__(role, message, traceback, user_error, kind)
        self.role, self.message, self.traceback, self.user_error = role, message, traceback, user_error
        self.kind = kind

    @classmethod
    def of(cls, role: str, error: Exception, traceback: str) -> RoleError:
        kind, is_users = type(error).__name__, isinstance(error, UserError)
        return cls(role, str(error) if is_users else f"{kind}: {error}", traceback, is_users, kind)

    def __str__(self) -> str:
        return f"{self.role}: {self.message}"


class RoleDied(RuntimeError):
    """A process died: killed, crashed or out of memory. `observed`: by the runtime itself; other reports of deaths may
    be consequences of it."""

    def __init__(self, role: str, detail: str, observed: bool = False):
        super().__init__(role, detail, observed)
        self.role, self.detail, self.observed = role, detail, observed

    def __str__(self) -> str:
        return f"{self.role} died: {self.detail}"
