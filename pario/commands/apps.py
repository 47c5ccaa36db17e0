"""The commands that stand in files of their own."""

from __future__ import annotations

from pario.commands import app_checkpoint, app_choose, app_control, app_files, app_pack, app_trace, app_view

__all__ = ["COMMANDS"]

COMMANDS = (
    app_control.control, app_choose.choose,
    app_pack.pack, app_pack.unpack,
    app_trace.trace, app_trace.advise,
    app_files.mount, app_view.view,
    app_checkpoint.checkpoint,
)  # fmt: skip
