//! Tables of codes and the vector instructions beside the unit, against plain Rust.
use kv_format::{KvFormat, Scaling};

use super::codes;

#[test]
fn tables_hold_the_bf16_of_every_code() {
    let tensor = Scaling::Tensor;
    let tables = [
        (KvFormat::Fp8E4m3(tensor), &codes::E4M3),
        (KvFormat::Fp8E5m2(tensor), &codes::E5M2),
        (KvFormat::Int8(tensor), &codes::INT8),
    ];
    let row: Vec<u8> = (0..=u8::MAX).collect();
    for (format, table) in tables {
        let mut values = vec![0.0; row.len()];
        kv_format::row::decode_row(format, 1.0, &row, &mut values);
        for (code, value) in row.iter().zip(values) {
            let found = f32::from_bits(u32::from(table.of(*code)) << 16);
            let alike = found.to_bits() == value.to_bits() || found.is_nan() && value.is_nan();
            assert!(alike, "{format} {code}: {found} for {value}");
        }
    }
}

/// The vector instructions that serve the unit, which CPUs without AMX have too, against plain
/// Rust.
#[cfg(target_arch = "x86_64")]
mod vectors {
    use crate::amx::codes::{self, Codes};
    use crate::amx::unit::{Unit, Words};
    use crate::amx::{BLOCK, BLOCK_WORDS, x86_codes};
    use crate::avx512::Avx512;
    use crate::testing::amx::Emulated;
    use crate::testing::wide::Wide;

    fn has_vectors() -> bool {
        is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vbmi")
            && is_x86_feature_detected!("avx512vbmi2")
            && is_x86_feature_detected!("gfni")
    }

    /// Packs words in every way, by one kind of vectors.
    fn packed<W: Words>(w: W, from: &[u32; BLOCK_WORDS]) -> Vec<u32> {
        let mut to = vec![0; 20 * BLOCK];
        let rows = |row: usize| from.as_ptr().wrapping_add(row * BLOCK);
        let places: Vec<*mut u32> =
            (0..20).map(|row| to.as_mut_ptr().wrapping_add(row * BLOCK)).collect();
        // SAFETY: rows of a block.
        let values = [0, 1].map(|row| unsafe { w.load(rows(row).cast(), 0) });
        // SAFETY: as above.
        let bits = [2, 3].map(|row| unsafe { w.load_bits(rows(row), 0) });
        // SAFETY: sixteen rows.
        unsafe { w.transpose(from.as_ptr(), (places[0], BLOCK), BLOCK) };
        // SAFETY: the rows after them.
        unsafe { w.store_words(places[16], values[0], w.truncate(values[1])) };
        // SAFETY: as above.
        unsafe { w.store_halves([places[17], places[18]], bits[0], bits[1]) };
        // SAFETY: as above.
        unsafe { w.store(places[19].cast(), 0, w.truncate(values[0])) };
        to
    }

    #[test]
    fn words_are_packed_as_in_plain_rust() {
        if has_vectors() {
            // Numbers of both signs between 1/2 and 1.
            let word = |i: u32| 0x3f00_0000 | i << 31 | i.wrapping_mul(0x9e37_79b9) >> 9;
            let block = std::array::from_fn(|i| word(u32::try_from(i).unwrap()));
            assert_eq!(packed(Avx512::witness(), &block), packed(Wide, &block));
        }
    }

    /// Rows of words of 128 codes: those of four groups, of pairs of groups, and of a line.
    type Rows = [[u32; BLOCK]; 10];

    /// Returns the addresses of groups of codes, and of rows of words.
    fn places(codes: &[u8; 128], to: &mut Rows) -> ([*const u8; 4], [*mut u32; 10]) {
        let from = [0, 32, 64, 96].map(|at| codes.as_ptr().wrapping_add(at));
        (from, to.each_mut().map(|row| row.as_mut_ptr()))
    }

    fn plain(table: &Codes, codes: &[u8; 128]) -> Rows {
        let mut rows = Rows::default();
        let (from, to) = places(codes, &mut rows);
        // SAFETY: groups of codes, and rows of words.
        unsafe { Emulated.code_words(table, from, [to[0], to[1], to[2], to[3]]) };
        // SAFETY: as above.
        unsafe { Emulated.code_pairs(table, from, [to[4], to[5], to[6], to[7]]) };
        // SAFETY: a line of codes, and rows of words.
        unsafe { Emulated.code_line(table, from[0], [to[8], to[9]]) };
        rows
    }

    /// The same by vectors, which the CPU has.
    fn looked_up(table: &Codes, codes: &[u8; 128]) -> Rows {
        let mut rows = Rows::default();
        let (from, to) = places(codes, &mut rows);
        // SAFETY: groups of codes, and rows of words; callers have detected the features.
        unsafe { x86_codes::words::<false>(table, from, [to[0], to[1], to[2], to[3]]) };
        // SAFETY: as above.
        unsafe { x86_codes::words::<true>(table, from, [to[4], to[5], to[6], to[7]]) };
        // SAFETY: a line of codes, and rows of words, else as above.
        unsafe { x86_codes::line(table, from[0], [to[8], to[9]]) };
        rows
    }

    #[test]
    fn codes_are_looked_up_as_in_plain_rust() {
        if has_vectors() {
            for table in [&codes::E4M3, &codes::E5M2, &codes::INT8] {
                for half in [0, 128] {
                    let codes = std::array::from_fn(|i| half + u8::try_from(i).unwrap());
                    assert_eq!(looked_up(table, &codes), plain(table, &codes));
                }
                // A line has codes of both signs.
                let codes = std::array::from_fn(|i| u8::try_from(i).unwrap().wrapping_mul(151));
                assert_eq!(looked_up(table, &codes), plain(table, &codes));
            }
        }
    }
}
