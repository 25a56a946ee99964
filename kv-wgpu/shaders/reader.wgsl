// Reading the binding `$name`, an array of words, by bytes.

fn $name_word(at: u32) -> u32 {
    return $name[at >> 2u];
}
// 16 bits at an even byte.
fn $name_half(at: u32) -> u32 {
    return $name[at >> 2u] >> ((at & 2u) * 8u) & 0xffffu;
}
fn $name_byte(at: u32) -> u32 {
    return $name[at >> 2u] >> ((at & 3u) * 8u) & 0xffu;
}
// Bits of element `i` of a row of plain numbers, as an f32.
fn $name_bits(dtype: u32, row: u32, i: u32) -> u32 {
    if dtype == F32 {
        return $name_word(row + 4u * i);
    }
    let bits = $name_half(row + 2u * i);
    return select(f16_widen(bits), bits << 16u, dtype == BF16);
}
fn $name_load(dtype: u32, row: u32, i: u32) -> f32 {
    return bitcast<f32>($name_bits(dtype, row, i));
}
