//! AMX: scores and sums against `f64`, on the emulated unit and on that of this CPU.
use kv_cpu_kernels::amx::{BLOCK, ColumnOrder, Gemm, Memory, Narrow, QueryRows, TILE_TOKENS};
use kv_cpu_kernels::{Isa, Kernels, KeyRows, Prefetch, PrefetchTarget, RowLayout, TileRows};
use kv_format::{KvFormat, Scaling};

/// A relative error that sums of `f32` stay below.
const EXACT: f64 = 2e-6;
/// The same with weights of two terms.
const SHORT: f64 = 4e-5;

fn kernels() -> Vec<(String, Kernels)> {
    let of_cpu = Isa::available().rfind(|isa| isa.has_amx());
    let of_cpu = of_cpu.and_then(|isa| Kernels::new(isa, PrefetchTarget::L2));
    let all = [Some(Kernels::emulated_amx()), of_cpu];
    all.into_iter().flatten().map(|kernels| (kernels.isa().to_string(), kernels)).collect()
}

fn formats() -> [KvFormat; 6] {
    let row = Scaling::Row;
    [
        KvFormat::F16,
        KvFormat::Bf16,
        KvFormat::Fp8E4m3(row),
        KvFormat::Fp8E5m2(row),
        KvFormat::Int8(row),
        KvFormat::Int8(Scaling::Tensor),
    ]
}

struct Random(u64);

impl Random {
    fn bits(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        u32::try_from(self.0 >> 33).unwrap()
    }
    /// A number in -1..1.
    fn unit(&mut self) -> f32 {
        f32::from_bits(0x4000_0000 | self.bits() & 0x007f_ffff) - 3.0
    }
    fn units(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.unit()).collect()
    }
    /// Numbers of one to three terms of bf16.
    fn of_terms(&mut self, terms: usize) -> f32 {
        let keep = [u32::MAX << 16, u32::MAX << 9, u32::MAX][terms - 1];
        f32::from_bits(self.unit().to_bits() & keep)
    }
}

/// Stored rows of a tile and their values, without scales.
struct Tile {
    layout: RowLayout,
    bytes: Vec<u8>,
    stride: usize,
    values: Vec<Vec<f32>>,
    /// Lengths of runs.
    runs: Vec<usize>,
}

impl Tile {
    /// Random rows in runs of the given lengths, with gaps between them.
    fn new(random: &mut Random, kernels: Kernels, layout: RowLayout, runs: &[usize]) -> Self {
        let (tokens, stride) = (runs.iter().sum(), layout.bytes() + 6);
        let mut bytes = vec![0xff; (tokens + runs.len()) * stride];
        let mut values = Vec::new();
        for token in 0..tokens {
            let row = &mut bytes[token * stride..][..layout.bytes()];
            loop {
                let mut decoded = vec![0.0; layout.dim()];
                row.fill_with(|| u8::try_from(random.bits() & 0xff).unwrap());
                // Of 16 bits only the upper byte could make a number too large.
                if layout.bytes() >= 2 * layout.dim() {
                    row.iter_mut().skip(1).step_by(2).for_each(|byte| *byte = *byte & 0x83 | 0x38);
                } else {
                    for byte in row.iter_mut() {
                        *byte &= 0xbb;
                    }
                }
                kernels.decode(&layout, row, &mut decoded);
                if decoded.iter().all(|value| value.is_finite()) {
                    values.push(decoded);
                    break;
                }
            }
        }
        Self { layout, bytes, stride, values, runs: runs.to_vec() }
    }

    fn dim(&self) -> usize {
        self.layout.dim()
    }
    fn runs(&self) -> Vec<KeyRows<'_>> {
        let mut first = 0;
        let run = |count: &usize| {
            let bytes = &self.bytes[first * self.stride..];
            first += count;
            KeyRows::new(bytes, self.stride, *count, &self.layout)
        };
        self.runs.iter().map(run).collect()
    }

    /// Query rows of some heads, padded.
    fn queries(&self, random: &mut Random, rows: usize, terms: usize) -> (Vec<f32>, usize) {
        let stride = self.dim().next_multiple_of(64);
        let value = |d: usize| if d < self.dim() { random.of_terms(terms) } else { 0.0 };
        ((0..rows).flat_map(|_| 0..stride).map(value).collect(), stride)
    }

    fn check_scores(&self, (q, stride): (&[f32], usize), scores: &[f32], name: &str) {
        for (row, q) in q.chunks(stride).enumerate() {
            for (token, k) in self.values.iter().enumerate() {
                let products = q.iter().zip(k).map(|(q, k)| f64::from(*q) * f64::from(*k));
                let at = format!("{name}: score of {row} {token}");
                near(scores[row * TILE_TOKENS + token], products, EXACT, &at);
            }
        }
    }

    /// Weights that are zero after the last token.
    fn weights(&self, random: &mut Random, rows: usize) -> Vec<f32> {
        let mut weights = random.units(rows * TILE_TOKENS);
        weights.chunks_mut(TILE_TOKENS).for_each(|row| row[self.values.len()..].fill(0.0));
        weights
    }

    fn check_sums(
        &self,
        weights: &[f32],
        (before, after): (&[f32], &[f32]),
        exact: bool,
        name: &str,
    ) {
        let stride = self.dim().next_multiple_of(32);
        for (row, weights) in weights.chunks(TILE_TOKENS).enumerate() {
            for d in 0..self.dim() {
                let values = self.values.iter().map(|v| f64::from(v[d]));
                let products = weights.iter().zip(values).map(|(w, v)| f64::from(*w) * v);
                let all = products.chain([f64::from(before[row * stride + d])]);
                let allowed = if exact { EXACT } else { SHORT };
                near(after[row * stride + d], all, allowed, &format!("{name}: sum {row} {d}"));
            }
        }
    }
}

/// Checks a sum of products.
fn near(got: f32, products: impl Iterator<Item = f64>, allowed: f64, name: &str) {
    let (sum, size) = products.fold((0.0, 0.0), |(sum, size), x| (sum + x, size + x.abs()));
    let off = (f64::from(got) - sum).abs();
    assert!(off <= allowed * size, "{name}: {off} of {size}");
}

/// Calls a test with tiles of every encoding, of several lengths and of runs that break in blocks.
fn for_tiles(seed: u64, mut test: impl FnMut(&mut Random, &str, Kernels, &Tile)) {
    let cases: [(u32, &[usize]); 6] = [
        (1, &[1]),
        (31, &[16, 1]),
        (32, &[40]),
        (72, &[16, 5, 3, 40, 1]),
        (96, &[7, 57, 64]),
        (128, &[97]),
    ];
    let mut random = Random(seed);
    for ((name, kernels), format) in
        kernels().iter().flat_map(|kernels| formats().map(|format| (kernels, format)))
    {
        for (dim, runs) in cases {
            let layout = RowLayout::of(format, dim).unwrap();
            let pairs = Some(layout.in_pairs()).filter(|pairs| *pairs != layout);
            for layout in [Some(layout), pairs].into_iter().flatten() {
                let name = format!("{name} {:?} {dim} {runs:?}", layout.encoding());
                let tile = Tile::new(&mut random, *kernels, layout, runs);
                test(&mut random, &name, *kernels, &tile);
            }
        }
    }
}

#[test]
fn blocks_of_query_rows_are_multiplied() {
    for_tiles(12, |random, name, kernels, tile| {
        let (runs, dim, out_stride) = (tile.runs(), tile.dim(), tile.dim().next_multiple_of(32));
        let mut floats = vec![f32::NAN; Memory::floats(dim, dim)];
        let mut memory = Memory::new(&mut floats, dim, dim);
        for (terms, exact) in [(1, true), (2, false), (3, true)] {
            let rows = BLOCK + 1;
            let (q, stride) = tile.queries(random, rows, terms);
            let queries = QueryRows { values: &q, stride, rows, dim, exact };
            let gemm = Gemm::new(kernels, &queries).unwrap();
            assert!(gemm.terms() <= terms, "{name}: {terms}");
            let mut words = vec![u32::MAX; gemm.query_words()];
            gemm.pack_queries(&q, &mut words);
            let all = TileRows::new(&runs);
            gemm.pack_keys(&all, &mut memory, &mut Prefetch::none());
            gemm.pack_values(&all, &mut memory, &mut Prefetch::none());
            let mut scores = vec![f32::NAN; 2 * BLOCK * TILE_TOKENS];
            for first in [0, BLOCK] {
                gemm.scores(&words, first, &memory, &mut scores[first * TILE_TOKENS..]);
            }
            tile.check_scores((&q, stride), &scores, name);
            let weights = tile.weights(random, BLOCK);
            let before = random.units(BLOCK * out_stride);
            let mut out = before.clone();
            gemm.sums(&mut memory, &weights, (&mut out, out_stride));
            tile.check_sums(&weights, (&before, &out), exact, name);
        }
    });
}

#[test]
fn few_query_rows_are_columns() {
    for_tiles(13, |random, name, kernels, tile| {
        let (runs, dim, out_stride) = (tile.runs(), tile.dim(), tile.dim().next_multiple_of(32));
        let mut floats = vec![f32::NAN; Memory::floats(dim, dim)];
        let mut memory = Memory::new(&mut floats, dim, dim);
        for (rows, terms, exact) in [(1, 1, true), (5, 2, false), (15, 3, true)] {
            let (q, stride) = tile.queries(random, rows, terms);
            let queries = QueryRows { values: &q, stride, rows, dim, exact };
            let narrow = Narrow::new(kernels, &queries).unwrap();
            let mut words = vec![u32::MAX; narrow.query_words()];
            narrow.pack_queries(&q, ColumnOrder::of(tile.layout.encoding()), &mut words);
            let all = TileRows::new(&runs);
            let mut scores = vec![f32::NAN; BLOCK * TILE_TOKENS];
            let none = &mut Prefetch::none();
            narrow.scores(&words, (&all, &mut memory), &mut scores, none);
            tile.check_scores((&q, stride), &scores, name);
            let weights = tile.weights(random, rows);
            let before = random.units(rows * out_stride);
            let mut out = before.clone();
            narrow.sums((&all, &mut memory), &weights, (&mut out, out_stride), none);
            tile.check_sums(&weights, (&before, &out), exact, name);
        }
    });
}

/// All codes of one byte: a row of each, of 64 values.
fn all_codes() -> (Vec<Vec<u8>>, [KvFormat; 3]) {
    let rows = (0..4_u8).map(|row| (0..64).map(|d| row * 64 + d).collect());
    let tensor = Scaling::Tensor;
    let formats = [KvFormat::Fp8E4m3(tensor), KvFormat::Fp8E5m2(tensor), KvFormat::Int8(tensor)];
    (rows.collect(), formats)
}

/// Products with one are the values of codes, and those that are not finite stay so.
#[test]
fn every_code_is_multiplied_as_its_value() {
    const DIM: usize = 64;
    let (rows, formats) = all_codes();
    for ((name, kernels), format) in
        kernels().iter().flat_map(|kernels| formats.map(|format| (kernels, format)))
    {
        let layout = RowLayout::of(format, 64).unwrap();
        for (row, query) in rows.iter().flat_map(|row| (0..DIM).map(move |d| (row, d))) {
            let mut value = [0.0; DIM];
            kv_format::row::decode_row(format, 1.0, row, &mut value);
            // Only one code of the row is not zero.
            let mut bytes = [0_u8; DIM];
            bytes[query] = row[query];
            let runs = [KeyRows::new(&bytes, DIM, 1, &layout)];
            let (tile, value) = (TileRows::new(&runs), value[query]);
            let mut floats = vec![0.0; Memory::floats(DIM, DIM)];
            let mut memory = Memory::new(&mut floats, DIM, DIM);
            let q = [1.0; DIM];
            let queries = QueryRows { values: &q, stride: DIM, rows: 1, dim: DIM, exact: true };
            let narrow = Narrow::new(*kernels, &queries).unwrap();
            let mut words = vec![0; narrow.query_words()];
            narrow.pack_queries(&q, ColumnOrder::Codes, &mut words);
            let (mut scores, none) = (vec![0.0; BLOCK * TILE_TOKENS], &mut Prefetch::none());
            narrow.scores(&words, (&tile, &mut memory), &mut scores, none);
            let (mut weights, mut out) = ([0.0; TILE_TOKENS], [0.0; DIM]);
            weights[0] = 1.0;
            narrow.sums((&tile, &mut memory), &weights, (&mut out, DIM), none);
            for found in [scores[0], out[query]] {
                assert_eq!(found.is_finite(), value.is_finite(), "{name} {format} {}", row[query]);
                if value.is_finite() {
                    near(found, std::iter::once(f64::from(value)), 0.0, name);
                }
            }
            assert_eq!(narrow.is_finite(&out), value.is_finite(), "{name} {format}");
        }
    }
}

#[test]
fn numbers_that_are_not_finite_are_found() {
    for (name, kernels) in kernels() {
        let q = [1.0; 64];
        let queries = QueryRows { values: &q, stride: 64, rows: 1, dim: 64, exact: true };
        let gemm = Gemm::new(kernels, &queries).unwrap();
        let mut values = vec![f32::MAX; 77];
        assert!(gemm.is_finite(&values), "{name}");
        for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            values[76] = odd;
            assert!(!gemm.is_finite(&values), "{name} {odd}");
        }
    }
}

#[test]
#[should_panic(expected = "one AMX session at a time")]
fn a_thread_has_one_session() {
    let q = [1.0; 64];
    let queries = QueryRows { values: &q, stride: 64, rows: 1, dim: 64, exact: true };
    let _first = Gemm::new(Kernels::emulated_amx(), &queries);
    let _second = Narrow::new(Kernels::emulated_amx(), &queries);
}

#[test]
fn only_sets_with_amx_have_sessions() {
    let queries = QueryRows { values: &[0.0; 64], stride: 64, rows: 1, dim: 64, exact: true };
    assert!(Gemm::new(Kernels::emulated(), &queries).is_none());
    let amx = Kernels::emulated_amx();
    assert!(amx.isa().has_amx() && amx.isa().is_available());
}
