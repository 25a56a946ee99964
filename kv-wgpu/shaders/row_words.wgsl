// Rows of values or codes in the memory of a workgroup of 64: eight rows, each shared by eight
// neighbours, of which each holds every eighth value. A barrier must precede reads of other
// invocations' values.

const ROWS: u32 = 8u;
// Padded, so that neighbouring rows begin in different banks.
const ROW_WORDS: u32 = 264u;

// Bits of f32.
var<workgroup> row_bits: array<u32, 2112>;

fn row_at(local: u32) -> u32 {
    return local / 8u * ROW_WORDS;
}
// Returns the length of a row that is padded to whole groups of 32.
fn filled(dim: u32) -> u32 {
    return (dim + 31u) / 32u * 32u;
}
fn row_value(at: u32) -> f32 {
    return bitcast<f32>(row_bits[at]);
}

// Returns the bits of |x|. They order as the values do; NaN is above infinity.
fn magnitude_bits(x: f32) -> u32 {
    return bitcast<u32>(x) & 0x7fffffffu;
}

// Rounds to the nearest f16, saturated at 65504; keeps NaN.
fn f16_saturated(x: f32) -> u32 {
    let bits = f16_bits(x);
    return select(bits, bits - 1u, (bits & 0x7fffu) == 0x7c00u);
}
