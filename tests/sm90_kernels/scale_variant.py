"""The variants of `scale_tile` that the tests build and launch."""

from flash_kda.sm90.variants import Limits, Variant

TILE = "tensordesc<bf16[{ROWS},1,{LANES}],{TILE_LAYOUT!r}>"

SCALE = Variant(
    name="scale",
    module="scale_tile",
    function="scale_tile",
    signature={
        "x_desc": TILE,
        "y_desc": TILE,
        "bias_ptr": "*fp32",
        "marks_ptr": "*i64",
        "n_heads": "i32",
        "first_row": "i64",
        "scale": "fp32",
    },
    constexprs={"WITH_BIAS": True},
    limits=Limits(registers=168),
    aligned=("marks_ptr",),
)
