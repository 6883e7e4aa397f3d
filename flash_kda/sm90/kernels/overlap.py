"""Kernels that follow each other on a stream and overlap: the later one starts before the earlier one has ended.

Both instructions do nothing in a kernel that was launched in the ordinary way.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def let_next_start():
    """The kernel behind this one on the stream may start once every CTA has said so, or ended."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r,~{memory}", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_for_previous():
    """Wait until the kernel before this one on the stream has ended and what it wrote can be seen."""
    gl.inline_asm_elementwise("griddepcontrol.wait; mov.b32 $0, 0;", "=r,~{memory}", [], dtype=gl.int32, is_pure=False, pack=1)
