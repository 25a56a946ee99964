//! Scores and sums by blocks, on the real unit where there is one and on the emulated one.
use kv_core::KvFormat;

use super::formats::Tiled;
use super::*;
use crate::kernel::{Matrix, Memory, Queries, QueryShape, StoredRows};

fn units() -> Vec<(String, Kernels)> {
    all().into_iter().filter(|(_, kernels)| kernels.has_matrix(Encoding::Bf16)).collect()
}

/// Values whose terms are one bf16, two and three.
fn values(random: &mut Random, terms: usize, len: usize) -> Vec<f32> {
    let keep = [u32::MAX << 16, u32::MAX << 9, u32::MAX][terms - 1];
    (0..len).map(|_| f32::from_bits(random.unit().to_bits() & keep)).collect()
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
            let shape = QueryShape { rows: 2 * BLOCK + 1, dim: self.dim, terms };
            let q = values(random, terms, shape.rows * self.dim);
            assert!(self.unit.terms(&q) <= terms, "{name}: terms");
            let mut words = vec![u32::MAX; shape.words()];
            self.unit.queries((&q, self.dim), shape, &mut words);
            let queries = Queries { shape, words: &words };
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
    let cases = [(1, 1), (16, 15), (31, 16), (32, 17), (33, TILE - 1), (80, TILE), (128, TILE)];
    for (format, (dim, tokens)) in
        KvFormat::all().flat_map(|format| cases.into_iter().map(move |case| (format, case)))
    {
        let tile = Tiled::new(&mut random, format, dim);
        let layouts = [tile.layout, tile.layout.in_pairs()];
        let rows: Vec<&[u8]> = tile.bytes[..tokens].iter().map(Vec::as_slice).collect();
        for ((name, kernels), layout) in
            units().iter().flat_map(|unit| layouts.map(|layout| (unit.clone(), layout)))
        {
            if !kernels.has_matrix(layout.encoding()) {
                continue;
            }
            let name = format!("{name} {format} {dim} {tokens} {:?}", layout.encoding());
            let in_order: Vec<Vec<f64>> = tile.values[..tokens]
                .iter()
                .map(|row| {
                    let mut row = row.clone();
                    if layout.encoding() == Encoding::Bf16Pairs {
                        kernels.split_pairs(&mut row);
                    }
                    row.into_iter().map(f64::from).collect()
                })
                .collect();
            let unit = kernels.matrix().unwrap();
            // Whoever uses the unit in between leaves it as it was.
            drop(kernels.matrix());
            let mut words = vec![u32::MAX; Memory::words(dim, dim)];
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
