// Numbers of 8 bits and fewer: kv-quant's minifloat.rs and lloyd.rs.

// Encodings of a row, in the order of kv-core's `KvFormat::all`.
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

// The low 4 bits.
fn e2m1_decode(code: u32) -> f32 {
    let fields = code & 7u;
    let sign = (code & 8u) << 28u;
    if fields < 2u {
        return bitcast<f32>(sign | bitcast<u32>(f32(fields) * 0.5));
    }
    return bitcast<f32>(sign | ((fields << 22u) + (126u << 23u)));
}

fn int8_decode(code: u32) -> f32 {
    return f32(i32(code << 24u) >> 24u);
}

// Bytes of a whole group of 32 codes.
fn group_bytes(bits: u32) -> u32 {
    return select(select(24u, 16u, bits == 4u), 12u, bits == 3u);
}

// Magnitudes of 3, 4 and 6 bits one behind the other, ascending; filled by `fill_books`.
var<workgroup> books: array<f32, 44>;

fn fill_books(local: u32) {
    // A constant may not be indexed by a variable everywhere, a variable may.
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

// Where the magnitudes of so many bits begin in `books`.
fn book_begin(bits: u32) -> u32 {
    return select(select(12u, 4u, bits == 4u), 0u, bits == 3u);
}

// The level of a code, its sign on top.
fn lloyd_level(bits: u32, code: u32) -> f32 {
    let index = code & ((1u << (bits - 1u)) - 1u);
    let sign = (code >> (bits - 1u) & 1u) << 31u;
    return bitcast<f32>(bitcast<u32>(books[book_begin(bits) + index]) | sign);
}
