// Byte access for writing the binding `$name`, an array of atomic words. Several invocations may
// write different bytes of one word.

fn $name_put_word(at: u32, bits: u32) {
    atomicStore(&$name[at >> 2u], bits);
}
// Writes the bytes of word `index` that `mask` selects.
fn $name_put_masked(index: u32, mask: u32, bits: u32) {
    if mask == 0xffffffffu {
        atomicStore(&$name[index], bits);
    } else if mask != 0u {
        atomicAnd(&$name[index], ~mask);
        atomicOr(&$name[index], bits & mask);
    }
}
// Writes 16 bits at an even byte.
fn $name_put_half(at: u32, bits: u32) {
    let shift = (at & 2u) * 8u;
    $name_put_masked(at >> 2u, 0xffffu << shift, bits << shift);
}
// Writes two 16-bit values at an even byte, the first in the lower half.
fn $name_put_pair(at: u32, low: u32, high: u32) {
    if (at & 2u) == 0u {
        $name_put_word(at, low | (high << 16u));
    } else {
        $name_put_half(at, low);
        $name_put_half(at + 2u, high);
    }
}
// Writes element `i` of an unquantised row.
fn $name_store(dtype: u32, row: u32, i: u32, x: f32) {
    if dtype == F32 {
        $name_put_word(row + 4u * i, bitcast<u32>(x));
    } else {
        $name_put_half(row + 2u * i, half_bits(dtype, x));
    }
}
// Writes elements `i` and `i + 1`.
fn $name_store_pair(dtype: u32, row: u32, i: u32, low: f32, high: f32) {
    if dtype == F32 {
        $name_put_word(row + 4u * i, bitcast<u32>(low));
        $name_put_word(row + 4u * i + 4u, bitcast<u32>(high));
    } else {
        $name_put_pair(row + 2u * i, half_bits(dtype, low), half_bits(dtype, high));
    }
}
