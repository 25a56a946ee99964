// Byte access to the binding `$name`, an array of words. `$aligned` says that reads of four
// elements begin at a whole word.

fn $name_word(at: u32) -> u32 {
    return $name[at >> 2u];
}
// Reads 16 bits at an even byte.
fn $name_half(at: u32) -> u32 {
    return ($name[at >> 2u] >> ((at & 2u) * 8u)) & 0xffffu;
}
fn $name_byte(at: u32) -> u32 {
    return ($name[at >> 2u] >> ((at & 3u) * 8u)) & 0xffu;
}
// Reads four bytes at any byte.
fn $name_bytes(at: u32) -> u32 {
    let word = at >> 2u;
    let shift = (at & 3u) * 8u;
    if $aligned {
        return $name[word];
    }
    var bits = $name[word] >> shift;
    if shift != 0u {
        bits |= $name[word + 1u] << (32u - shift);
    }
    return bits;
}
// Reads four times 16 bits at an even byte.
fn $name_halves(at: u32) -> vec4<u32> {
    let word = at >> 2u;
    var low = $name[word];
    var high = $name[word + 1u];
    if !$aligned && (at & 2u) != 0u {
        low = (low >> 16u) | (high << 16u);
        high = (high >> 16u) | ($name[word + 2u] << 16u);
    }
    return vec4<u32>(low & 0xffffu, low >> 16u, high & 0xffffu, high >> 16u);
}
fn $name_four_f32(at: u32) -> vec4<f32> {
    let word = at >> 2u;
    return bitcast<vec4<f32>>(vec4<u32>($name[word], $name[word + 1u], $name[word + 2u], $name[word + 3u]));
}
fn $name_four_f16(at: u32) -> vec4<f32> {
    return f16_decode_four($name_halves(at));
}
fn $name_four_bf16(at: u32) -> vec4<f32> {
    return bitcast<vec4<f32>>($name_halves(at) << vec4<u32>(16u));
}
// Reads four unquantised numbers; f32 must lie at whole words.
fn $name_four(dtype: u32, at: u32) -> vec4<f32> {
    switch dtype {
        case F32: { return $name_four_f32(at); }
        case F16: { return $name_four_f16(at); }
        default: { return $name_four_bf16(at); }
    }
}
// Returns element `i` of an unquantised row, as the bits of an f32.
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
