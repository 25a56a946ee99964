// Decoding of numbers of 8 bits and fewer: kv-quant's minifloat.rs and lloyd.rs.

// Encodings of a row: kv-core's `KvFormat::kernel_constant`, by name. The host refuses all others.
const FMT_F32: u32 = 0u;
const FMT_F16: u32 = 1u;
const FMT_BF16: u32 = 2u;
const FMT_E4M3: u32 = 3u;
const FMT_E4M3_HEAD: u32 = 4u;
const FMT_E4M3_ROW: u32 = 5u;
const FMT_E5M2: u32 = 6u;
const FMT_E5M2_HEAD: u32 = 7u;
const FMT_E5M2_ROW: u32 = 8u;
const FMT_INT8_ROW: u32 = 9u;
const FMT_INT8: u32 = 10u;
const FMT_INT8_HEAD: u32 = 11u;
const FMT_L6: u32 = 12u;
const FMT_L6_G32: u32 = 13u;
const FMT_L4: u32 = 14u;
const FMT_L4_G32: u32 = 15u;
const FMT_L3: u32 = 16u;
const FMT_L3_G32: u32 = 17u;
const FMT_Q8_0: u32 = 18u;
const FMT_Q4_0: u32 = 19u;
const FMT_NVFP4: u32 = 20u;

const NAN: u32 = 0x7fc00000u;

// Returns NaN for a format that no case handles.
fn unknown_format() -> vec4<f32> {
    var bits = NAN;
    return vec4<f32>(bitcast<f32>(bits));
}

fn e4m3_decode(code: u32) -> f32 {
    let fields = code & 0x7fu;
    let sign = (code & 0x80u) << 24u;
    if fields == 0x7fu {
        return bitcast<f32>(sign | NAN);
    }
    if fields < 8u {
        return bitcast<f32>(sign | bitcast<u32>(f32(fields) * power_of_two(-9)));
    }
    return bitcast<f32>(sign | ((fields << 20u) + (120u << 23u)));
}

// Returns the four bytes of a word.
fn bytes_of(word: u32) -> vec4<u32> {
    return (vec4<u32>(word) >> vec4<u32>(0u, 8u, 16u, 24u)) & vec4<u32>(0xffu);
}

// Decodes the four bytes of a word, without branches.
fn e4m3_decode_four(word: u32) -> vec4<f32> {
    let codes = bytes_of(word);
    let fields = codes & vec4<u32>(0x7fu);
    let sign = (codes & vec4<u32>(0x80u)) << vec4<u32>(24u);
    // An exponent of 0 means a leading 0: decode it with a leading 1, then subtract that.
    let small = bitcast<vec4<f32>>((fields << vec4<u32>(20u)) + vec4<u32>(121u << 23u)) - power_of_two(-6);
    let usual = (fields << vec4<u32>(20u)) + vec4<u32>(120u << 23u);
    let bits = select(usual, bitcast<vec4<u32>>(small), fields < vec4<u32>(8u));
    return bitcast<vec4<f32>>(sign | select(bits, vec4<u32>(NAN), fields == vec4<u32>(0x7fu)));
}

// Decodes the low 4 bits.
fn e2m1_decode(code: u32) -> f32 {
    let fields = code & 7u;
    let sign = (code & 8u) << 28u;
    if fields < 2u {
        return bitcast<f32>(sign | bitcast<u32>(f32(fields) * 0.5));
    }
    return bitcast<f32>(sign | ((fields << 22u) + (126u << 23u)));
}

// Decodes four codes.
fn e2m1_decode_four(codes: vec4<u32>) -> vec4<f32> {
    return vec4<f32>(e2m1_decode(codes.x), e2m1_decode(codes.y), e2m1_decode(codes.z), e2m1_decode(codes.w));
}

// Decodes the four bytes of a word.
fn int8_decode_four(word: u32) -> vec4<f32> {
    return vec4<f32>(vec4<i32>(bytes_of(word) << vec4<u32>(24u)) >> vec4<u32>(24u));
}

// Returns the bytes of a whole group of 32 codes.
fn group_bytes(bits: u32) -> u32 {
    return select(select(24u, 16u, bits == 4u), 12u, bits == 3u);
}

// Magnitudes of 3, 4 and 6 bits, one codebook after another, ascending; `fill_books` fills it.
var<workgroup> books: array<f32, 44>;

fn fill_books(local: u32) {
    // Some compilers cannot index a constant array by a variable; a variable array works
    // everywhere.
    var values = array<f32, 44>(
        0.24509418, 0.7560053, 1.3439093, 2.1519456,
        0.12839504, 0.3880483, 0.65675914, 0.94234043, 1.2562312, 1.6180464, 2.0690172, 2.7325895,
        0.033409506, 0.10027829, 0.1672969, 0.23456699, 0.30219284, 0.37028265, 0.43894967, 0.5083138,
        0.578503, 0.6496556, 0.7219219, 0.7954677, 0.8704766, 0.94715494, 1.0257363, 1.1064882,
        1.1897202, 1.2757945, 1.365141, 1.4582764, 1.5558312, 1.6585889, 1.7675419, 1.8839773,
        2.009611, 2.1468103, 2.2989812, 2.471305, 2.6722739, 2.9174068, 3.240437, 3.7441013);
    for (var i = local; i < 44u; i += THREADS) {
        books[i] = values[i];
    }
    workgroupBarrier();
}

// Returns where the magnitudes of `bits` bits begin in `books`.
fn book_begin(bits: u32) -> u32 {
    return select(select(12u, 4u, bits == 4u), 0u, bits == 3u);
}

// Decodes four codes, whose signs are in the top bit.
fn lloyd_levels(bits: u32, codes: vec4<u32>) -> vec4<f32> {
    let at = (codes & vec4<u32>((1u << (bits - 1u)) - 1u)) + vec4<u32>(book_begin(bits));
    let sign = ((codes >> vec4<u32>(bits - 1u)) & vec4<u32>(1u)) << vec4<u32>(31u);
    let magnitudes = vec4<f32>(books[at.x], books[at.y], books[at.z], books[at.w]);
    return bitcast<vec4<f32>>(bitcast<vec4<u32>>(magnitudes) | sign);
}
