// Reads of rows of the plane `$name` for the tokens that `find` looked up. `$mean` is the place of
// the block's mean plus one, 0 without a mean; it is used if `$has_means`.

// Returns the factor of the levels of token `t`.
fn $name_factor_of(t: u32, scale: f32) -> f32 {
    if $format <= FMT_BF16 || (HAS_EXTRAS && how[t] == WIDE) {
        return 1.0;
    }
    return $name_factor($format, $name_at[t], params.$name.scales_begin, scale);
}

// Returns four values of token `t`, from the `i`th on.
fn $name_values(t: u32, i: u32, factor: f32, scale: f32) -> vec4<f32> {
    let row = $name_at[t];
    if HAS_EXTRAS && $format > FMT_BF16 && how[t] == WIDE {
        return $name_four_f16(row + 2u * i);
    }
    var x = $name_levels($format, row, params.$name.scales_begin, params.$name.head_dim, scale, i) * factor;
    if $has_means && $mean != 0u {
        x += $name_four_f16($mean - 1u + 2u * i);
    }
    return x;
}
