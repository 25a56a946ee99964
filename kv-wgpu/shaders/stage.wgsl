// Brings 32 values of every token of a tile of the plane `$name` to `stage`: zeros for tokens that are
// not here. `$mean` is one more than the place of the mean of a token's block, 0 where it has none.
fn stage_$name(dim: u32, begin: u32, local: u32, scale: f32) {
    let token = local / 4u;
    let first = local % 4u * 8u;
    let row = $name_at[token];
    let is_wide = wide[token] != 0u && $format > FMT_BF16;
    var factor = 1.0;
    if here[token] != 0u && !is_wide && $format > FMT_BF16 {
        factor = $name_factor($format, row, params.$name.scales_begin, scale);
    }
    for (var i = first; i < first + 8u; i++) {
        var x = 0.0;
        let at = begin + i;
        if here[token] != 0u && at < dim {
            if is_wide {
                x = f16_decode($name_half(row + 2u * at));
            } else {
                x = $name_level($format, row, params.$name.scales_begin, dim, scale, at) * factor;
            }
            if $mean != 0u {
                x += f16_decode($name_half($mean - 1u + 2u * at));
            }
        }
        stage[token * STRIDE + i] = x;
    }
}
