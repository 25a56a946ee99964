//! Scores and sums by blocks, on the real unit where there is one and on the emulated one.
use kv_core::{KvFormat, Scaling};

use super::formats::Tiled;
use super::*;
use crate::kernel::{Columns, Matrix, Memory, Queries, QueryShape, StoredRows};

fn units() -> Vec<(String, Kernels)> {
    all().into_iter().filter(|(_, kernels)| kernels.has_matrix(Encoding::Bf16)).collect()
}

/// Values whose terms are one bf16, two and three.
fn values(random: &mut Random, terms: usize, len: usize) -> Vec<f32> {
    let keep = [u32::MAX << 16, u32::MAX << 9, u32::MAX][terms - 1];
    (0..len).map(|_| f32::from_bits(random.unit().to_bits() & keep)).collect()
}

/// Rows in the order in which kernels take them.
fn in_order(kernels: Kernels, layout: &RowLayout, rows: &[Vec<f32>]) -> Vec<Vec<f64>> {
    let row = |row: &Vec<f32>| {
        let mut row = row.clone();
        if layout.encoding() == Encoding::Bf16Pairs {
            kernels.split_pairs(&mut row);
        }
        row.into_iter().map(f64::from).collect()
    };
    rows.iter().map(row).collect()
}

/// A tile as some tokens of it, in blocks.
struct Staged<'a> {
    unit: &'a Matrix,
    memory: Memory<'a>,
    dim: usize,
    tokens: &'a [Vec<f64>],
}

impl Staged<'_> {
    fn scores_are_products(&self, random: &mut Random, name: &str) {
        for terms in 1..=3 {
            let shape = QueryShape { rows: 2 * BLOCK + 1, dim: self.dim, terms, columns: BLOCK };
            let q = values(random, terms, shape.rows * self.dim);
            assert!(self.unit.terms(&q) <= terms, "{name}: terms");
            let mut words = vec![u32::MAX; shape.words()];
            self.unit.queries((&q, self.dim), shape, &mut words);
            let queries = Queries { shape, words: &words, codes: &[], bytes: &[] };
            let mut out = vec![f32::NAN; 3 * BLOCK * TILE];
            for first in [0, BLOCK, 2 * BLOCK] {
                self.unit.scores(&queries, first, &self.memory, &mut out[first * TILE..]);
            }
            for (row, q) in q.chunks(self.dim).enumerate() {
                for (token, k) in self.tokens.iter().enumerate() {
                    let products = || q.iter().zip(k).map(|(q, k)| f64::from(*q) * k);
                    let (sum, size) =
                        (products().sum::<f64>(), products().map(f64::abs).sum::<f64>());
                    let off = (f64::from(out[row * TILE + token]) - sum).abs();
                    assert!(off <= 2e-6 * size, "{name}: {row} {token}, {off} of {size}");
                }
            }
        }
    }

    fn sums_are_weighted(&mut self, random: &mut Random, name: &str) {
        let stride = self.dim.next_multiple_of(BLOCK);
        for (exact, allowed) in [(true, 2e-6), (false, 4e-5)] {
            let mut weights = random.units(BLOCK * TILE);
            for row in weights.chunks_mut(TILE) {
                row[self.tokens.len()..].fill(0.0);
            }
            let before = random.units(BLOCK * stride);
            let mut out = before.clone();
            self.unit.sums(&mut self.memory, &mut weights.clone(), exact, (&mut out, stride));
            for (row, d) in (0..BLOCK).flat_map(|row| (0..self.dim).map(move |d| (row, d))) {
                let products = || {
                    let weights = weights[row * TILE..].iter();
                    weights.zip(self.tokens).map(|(weight, v)| f64::from(*weight) * v[d])
                };
                let old = f64::from(before[row * stride + d]);
                let size = old.abs() + products().map(f64::abs).sum::<f64>();
                let off = f64::from(out[row * stride + d]) - products().sum::<f64>() - old;
                assert!(off.abs() <= allowed * size, "{name}: {row} {d}, {off} of {size}");
            }
        }
    }
}

#[test]
fn blocks_are_multiplied_as_the_numbers_they_hold() {
    let mut random = Random::new(12);
    let cases =
        [(1, 1), (16, 15), (31, 16), (32, 17), (64, 65), (33, TILE - 1), (80, TILE), (128, TILE)];
    for (format, (dim, tokens)) in
        KvFormat::all().flat_map(|format| cases.into_iter().map(move |case| (format, case)))
    {
        let tile = Tiled::new(&mut random, format, dim);
        let layouts = [tile.layout, tile.layout.in_pairs()];
        let rows = tile.bytes[..tokens].iter().map(Vec::as_slice);
        let rows = TileRows::of(rows, tile.layout.bytes());
        for ((name, kernels), layout) in
            units().iter().flat_map(|unit| layouts.map(|layout| (unit.clone(), layout)))
        {
            if !kernels.has_matrix(layout.encoding()) {
                continue;
            }
            let name = format!("{name} {format} {dim} {tokens} {:?}", layout.encoding());
            let in_order = in_order(kernels, &layout, &tile.values[..tokens]);
            let unit = kernels.matrix().unwrap();
            // Whoever uses the unit in between leaves it as it was.
            drop(kernels.matrix());
            let mut words = vec![f32::NAN; Memory::len(dim, dim)];
            let mut memory = Memory::new(&mut words, dim, dim);
            let tile = StoredRows { rows: &rows, layout: &layout, scale: tile.scale() };
            unit.stage([&tile, &tile], &mut memory, &mut Ahead::default());
            let mut staged = Staged { unit: &unit, memory, dim, tokens: &in_order };
            staged.scores_are_products(&mut random, &name);
            staged.sums_are_weighted(&mut random, &name);
        }
    }
}

#[test]
fn what_is_not_finite_is_seen() {
    for (name, kernels) in units() {
        let unit = kernels.matrix().unwrap();
        let mut values = vec![f32::MAX; 77];
        assert!(unit.is_finite(&values), "{name}");
        for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            values[76] = odd;
            assert!(!unit.is_finite(&values), "{name} {odd}");
        }
    }
}

/// Few rows, of which there may be one or several blocks of columns, by a tile whose rows follow
/// each other or do not.
fn few_rows_are_multiplied(
    (name, kernels): (&str, Kernels),
    random: &mut Random,
    (tile, tokens): (&StoredRows<'_>, &[Vec<f64>]),
    (rows, terms): (usize, usize),
) {
    let dim = tile.layout.dim();
    let mut unit = kernels.matrix().unwrap();
    let q = values(random, terms, rows * dim);
    let is_bytes = tile.layout.encoding() == Encoding::Int8;
    for (exact, allowed) in [(true, 2e-6), (false, 4e-5)] {
        let shape = unit.narrow((rows, dim, unit.terms(&q)), exact, is_bytes);
        let mut words = vec![u32::MAX; shape.column_words()];
        let (mut codes, mut bytes) = (words.clone(), vec![u32::MAX; shape.byte_words()]);
        unit.columns((&q, dim), shape, (&mut words, Columns::Words));
        unit.columns((&q, dim), shape, (&mut codes, Columns::Codes));
        unit.columns((&q, dim), shape, (&mut bytes, Columns::Bytes));
        let queries = Queries { shape, words: &words, codes: &codes, bytes: &bytes };
        let mut floats = vec![f32::NAN; Memory::len(dim, dim)];
        let mut memory = Memory::new(&mut floats, dim, dim);
        let mut scores = vec![f32::NAN; BLOCK * TILE];
        let ahead = &mut Ahead::default();
        unit.scores_of_few(&queries, (tile, &mut memory), &mut scores, ahead);
        let near = |got: f32, products: &mut dyn Iterator<Item = f64>, allowed: f64| {
            let (sum, size) = products.fold((0.0, 0.0), |(sum, size), x| (sum + x, size + x.abs()));
            let off = (f64::from(got) - sum).abs();
            assert!(off <= allowed * size, "{name} {rows} {terms}: {off} of {size}");
        };
        for (row, q) in q.chunks(dim).enumerate() {
            for (token, k) in tokens.iter().enumerate() {
                let mut products = q.iter().zip(k).map(|(q, k)| f64::from(*q) * k);
                near(scores[row * TILE + token], &mut products, 2e-6);
            }
        }
        let stride = dim.next_multiple_of(BLOCK);
        let mut weights = random.units(rows * TILE);
        weights.chunks_mut(TILE).for_each(|row| row[tokens.len()..].fill(0.0));
        let before = random.units(rows * stride);
        let mut out = before.clone();
        let given = (&mut weights.clone()[..], exact);
        unit.sums_of_few((tile, &mut memory), given, (&mut out, stride), ahead);
        for (row, d) in (0..rows).flat_map(|row| (0..dim).map(move |d| (row, d))) {
            let products = weights[row * TILE..].iter().zip(tokens);
            let products = products.map(|(weight, v)| f64::from(*weight) * v[d]);
            let old = f64::from(before[row * stride + d]);
            near(out[row * stride + d], &mut products.chain([old]), allowed);
        }
    }
}

#[test]
fn few_query_rows_are_columns() {
    let mut random = Random::new(13);
    // Of codes whole lines come first, then whole groups.
    let cases = [
        (1, 1),
        (31, 16),
        (33, 40),
        (64, TILE),
        (80, TILE),
        (96, 33),
        (128, TILE),
        (128, 50),
        (64, 97),
    ];
    for (format, (dim, tokens)) in
        KvFormat::all().flat_map(|format| cases.into_iter().map(move |case| (format, case)))
    {
        let tile = Tiled::new(&mut random, format, dim);
        let run: Vec<u8> = tile.bytes[..tokens].concat();
        let bytes = tile.layout.bytes();
        let mut even = TileRows::new();
        even.clear(bytes);
        even.push(&run, bytes, tokens);
        let apart = TileRows::of(tile.bytes[..tokens].iter().map(Vec::as_slice), bytes);
        for ((name, kernels), layout) in units()
            .iter()
            .flat_map(|unit| [tile.layout, tile.layout.in_pairs()].map(|layout| (unit, layout)))
        {
            if !kernels.has_matrix(layout.encoding()) {
                continue;
            }
            let name = format!("{name} {format} {dim} {tokens} {:?}", layout.encoding());
            let in_order = in_order(*kernels, &layout, &tile.values[..tokens]);
            let both = [(&even, [(1, 1), (4, 2), (15, 3)]), (&apart, [(3, 3), (5, 1), (8, 2)])];
            for (rows, counts) in both {
                let stored = StoredRows { rows, layout: &layout, scale: tile.scale() };
                for count in counts {
                    let with = (&stored, in_order.as_slice());
                    few_rows_are_multiplied((&name, *kernels), &mut random, with, count);
                }
            }
        }
    }
}

/// Every code of a byte comes out of products with ones and zeros as the number that it is.
#[test]
fn every_code_of_a_byte_is_multiplied_as_its_number() {
    const DIM: usize = 64;
    let formats = [KvFormat::Fp8E4m3, KvFormat::Fp8E5m2, KvFormat::Int8];
    for (format, (name, kernels)) in formats
        .map(|of| of(Scaling::Tensor))
        .into_iter()
        .flat_map(|format| units().into_iter().map(move |unit| (format, unit)))
    {
        let layout = RowLayout::of(format, DIM as u32).unwrap();
        let (codes, mut values) = ((0..=255).collect::<Vec<u8>>(), vec![0.0; 256]);
        kernels.decode(&RowLayout::of(format, 256).unwrap(), &codes, &mut values);
        let code = |token: usize, d: usize| match (token * DIM + d) as u8 {
            code if values[usize::from(code)].is_finite() => code,
            _ => 0,
        };
        let bytes: Vec<Vec<u8>> =
            (0..TILE).map(|token| (0..DIM).map(|d| code(token, d)).collect()).collect();
        let value = |token: usize, d: usize| values[usize::from(code(token, d))];
        let rows = TileRows::of(bytes.iter().map(Vec::as_slice), DIM);
        let tile = StoredRows { rows: &rows, layout: &layout, scale: RowScale::Given(1.0) };
        let mut floats = vec![f32::NAN; Memory::len(DIM, DIM)];
        let mut memory = Memory::new(&mut floats, DIM, DIM);
        let ahead = &mut Ahead::default();
        for first in 0..DIM {
            let (mut q, mut scores) = (vec![0.0; DIM], vec![f32::NAN; BLOCK * TILE]);
            q[first] = 1.0;
            let mut unit = kernels.matrix().unwrap();
            let shape = unit.narrow((1, DIM, 1), true, format == KvFormat::Int8(Scaling::Tensor));
            let mut words = vec![0; shape.column_words()];
            let (mut codes, mut bytes) = (words.clone(), vec![0; shape.byte_words()]);
            unit.columns((&q, DIM), shape, (&mut words, Columns::Words));
            unit.columns((&q, DIM), shape, (&mut codes, Columns::Codes));
            unit.columns((&q, DIM), shape, (&mut bytes, Columns::Bytes));
            let queries = Queries { shape, words: &words, codes: &codes, bytes: &bytes };
            unit.scores_of_few(&queries, (&tile, &mut memory), &mut scores, ahead);
            for (token, score) in scores[..TILE].iter().enumerate() {
                assert_eq!(*score, value(token, first), "{name} {format}: score of {token}");
            }
        }
        for token in 0..TILE {
            let (mut weights, mut out) = (vec![0.0; TILE], vec![0.0; DIM]);
            weights[token] = 1.0;
            let mut unit = kernels.matrix().unwrap();
            unit.narrow((1, DIM, 1), true, false);
            let given = (&mut weights[..], true);
            unit.sums_of_few((&tile, &mut memory), given, (&mut out, DIM), ahead);
            for (d, sum) in out.iter().enumerate() {
                assert_eq!(*sum, value(token, d), "{name} {format}: sum of {token}, {d}");
            }
        }
    }
}

/// What is not finite stays so, in whole lines of codes and behind them.
#[test]
fn codes_that_are_not_finite_make_their_sums_so() {
    const DIM: usize = 96;
    let formats = [KvFormat::Fp8E4m3, KvFormat::Fp8E5m2].map(|of| of(Scaling::Tensor));
    for (format, (name, kernels)) in
        formats.into_iter().flat_map(|format| units().into_iter().map(move |unit| (format, unit)))
    {
        let layout = RowLayout::of(format, DIM as u32).unwrap();
        let (codes, mut values) = ((0..=255).collect::<Vec<u8>>(), vec![0.0; 256]);
        kernels.decode(&RowLayout::of(format, 256).unwrap(), &codes, &mut values);
        let odd = codes.iter().filter(|code| !values[usize::from(**code)].is_finite());
        // A column each, as zero times NaN is NaN.
        let places = odd.enumerate().flat_map(|(i, code)| [3, 70].map(|d| (*code, d + i)));
        let places = places.collect::<Vec<_>>();
        assert!(places.len() >= 4, "{format}: NaN of both signs");
        let mut bytes = vec![vec![0_u8; DIM]; TILE];
        for (row, (code, d)) in bytes.iter_mut().zip(&places) {
            row[*d] = *code;
        }
        let rows = TileRows::of(bytes.iter().map(Vec::as_slice), DIM);
        let tile = StoredRows { rows: &rows, layout: &layout, scale: RowScale::Given(1.0) };
        let mut floats = vec![f32::NAN; Memory::len(DIM, DIM)];
        let mut memory = Memory::new(&mut floats, DIM, DIM);
        let ahead = &mut Ahead::default();
        let mut unit = kernels.matrix().unwrap();
        let shape = unit.narrow((1, DIM, 1), true, false);
        let mut words = vec![0; shape.column_words()];
        unit.columns((&[1.0; DIM], DIM), shape, (&mut words, Columns::Codes));
        let queries = Queries { shape, words: &[], codes: &words, bytes: &[] };
        let mut scores = vec![0.0; BLOCK * TILE];
        unit.scores_of_few(&queries, (&tile, &mut memory), &mut scores, ahead);
        for (token, score) in scores[..TILE].iter().enumerate() {
            let wanted = token >= places.len();
            assert_eq!(score.is_finite(), wanted, "{name} {format}: {:?}", places.get(token));
        }
        for (token, place) in places.iter().enumerate() {
            let (mut weights, mut out) = (vec![0.0; TILE], vec![0.0; DIM]);
            weights[token] = 1.0;
            unit.sums_of_few((&tile, &mut memory), (&mut weights, true), (&mut out, DIM), ahead);
            assert!(!out[place.1].is_finite(), "{name} {format}: {place:?}");
        }
    }
}
