//! Masked rows, which no query sees, are not read: blocks of other sequences, rows full of NaN.
use kv_core::backend::{Backend, Queue};
use kv_core::plan::{BatchEntry, Determinism};
use kv_core::{BlockId, KvFormat};

use super::attend::{case, entry, random_case, random_choice};
use super::fixture::{Case, Choice, Fixture};
use super::{Random, backends};
use crate::CpuBackend;

/// Returns whether some query of an entry sees `key`.
fn is_visible(entry: &BatchEntry, choice: &Choice, key: u32) -> bool {
    let kv_len = i64::from(entry.cached + entry.new_tokens);
    let first = kv_len - i64::from(entry.queries);
    (first..kv_len).any(|position| choice.sees(position, key))
}

/// Poisons values that no query sees. Table entries without a visible row name a block full of NaN,
/// and masked rows beside visible ones become NaN, if the format has one. Returns the numbers of
/// entries and rows.
fn poison_masked(fixture: &mut Fixture, backend: &CpuBackend, choice: &Choice) -> (usize, usize) {
    let layouts = fixture.layouts;
    let map = *layouts[0].slot_map();
    let used: Vec<_> = fixture.tables.rows().flatten().copied().collect();
    let spare = (0..layouts[0].num_blocks()).map(BlockId);
    let spare = spare.rev().find(|block| !used.contains(block)).unwrap();
    let mut queue = backend.queue().unwrap();
    let (mut entries, mut rows) = (0, 0);
    for entry in fixture.case.batch.clone() {
        let kv_len = entry.cached + entry.new_tokens;
        let table: Vec<_> = fixture.tables.row(entry.row).to_vec();
        let mut seen = vec![false; table.len()];
        let places = (0..kv_len).map(|key| (map.place(key), is_visible(&entry, choice, key)));
        // Blocks that the step writes stay in the table.
        for ((place, is_seen), key) in places.clone().zip(0..) {
            seen[place.index as usize] |= is_seen || key >= entry.cached;
        }
        for (index, _) in seen.iter().enumerate().filter(|(_, seen)| !**seen) {
            fixture.tables.replace(entry.row, index, spare).unwrap();
            entries += 1;
        }
        for (place, _) in places.filter(|(place, row)| seen[place.index as usize] && !row) {
            rows += 1;
            for (layout, segments) in layouts.iter().zip(&fixture.segments) {
                let (segment, begin) = layout.locate(table[place.index as usize].0);
                let bytes =
                    if place.is_wide { layout.wide_row_bytes() } else { layout.row_bytes() };
                for head in 0..layout.num_kv_heads() {
                    let at = begin + layout.row_begin(place, head);
                    queue.upload(&segments[segment], at, &vec![0xff; bytes as usize]).unwrap();
                }
            }
        }
    }
    (entries, rows)
}

/// Checks that poisoned rows change no bit of the result, which agrees with the reference.
fn check(case: &Case, choice: &Choice) -> (usize, usize) {
    let mut poisoned = (0, 0);
    for (name, backend) in backends() {
        let mut fixture = Fixture::new(&backend, case.clone());
        let bits = |both: [Vec<f32>; 2]| both.map(|x| x.iter().map(|x| x.to_bits()).collect());
        let before: [Vec<_>; 2] = bits(fixture.attend(&name, &backend, choice));
        poisoned = poison_masked(&mut fixture, &backend, choice);
        let after = bits(fixture.attend(&format!("{name}, poisoned"), &backend, choice));
        assert!(before == after, "{name}: other bits: {case:?} {choice:?}");
    }
    poisoned
}

#[test]
fn random_batches_read_no_masked_row() {
    let mut random = Random::new(11);
    let mut poisoned = (0, 0);
    for _ in 0..60 {
        let case = Case {
            determinism: random.pick(&[Determinism::Fast, Determinism::BatchInvariant]),
            ..random_case(&mut random)
        };
        let window = Some(random.pick(&[0, 1, 5, 20, 40]));
        let choice = Choice { window, ..random_choice(&mut random, &case) };
        let (entries, rows) = check(&case, &choice);
        poisoned = (poisoned.0 + entries, poisoned.1 + rows);
    }
    assert!(poisoned.0 > 500 && poisoned.1 > 200, "too little was poisoned: {poisoned:?}");
}

/// Long contexts in splits, most of them without a visible row: one query, several, and enough that
/// a context is not split; beside a sequence that sees all of its rows.
#[test]
fn split_contexts_read_no_masked_row_in_any_format() {
    let formats: Vec<_> = KvFormat::all().collect();
    let kinds = [
        (1, 4, Determinism::Fast),
        (5, 37, Determinism::BatchInvariant),
        (30, 4, Determinism::Fast),
        (1, 0, Determinism::BatchInvariant),
    ];
    for (index, format) in formats.into_iter().enumerate() {
        for (queries, sink_tokens, determinism) in kinds {
            let case = Case {
                formats: [format, KvFormat::F16],
                full_precision_prefix: [0, 3][index % 2],
                block_size: 16,
                workers: 8,
                determinism,
                ..case(vec![entry(0, 2100, queries, queries), entry(1, 7, 1, 1)])
            };
            let choice = Choice { window: Some(60), sink_tokens, ..Choice::default() };
            let (entries, _) = check(&case, &choice);
            assert!(entries > 120, "{format}: {entries}");
        }
    }
}
