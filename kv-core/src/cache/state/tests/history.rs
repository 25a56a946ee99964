//! Histories of sequences that fork and change tokens, compared with plain lists.
use proptest::prelude::*;

use super::*;
use crate::cache::state::history::History;
use crate::num::{to_u32, to_usize};
use crate::reuse::BlockKey;

/// Blocks that end with shared chunks, straddle them, or are longer.
const SIZES: [u32; 3] = [64, 48, 5000];

#[derive(Debug, Clone)]
enum Operation {
    /// Records tokens at a position: their number, and the first that differs from the known ones.
    Note(u32, usize, usize),
    /// Records tokens with unknown ids.
    Unknown(u32),
    /// Becomes a fork of another history with this many tokens.
    Fork(usize, u32),
    End,
}

/// Generates lengths around those of shared chunks.
fn length() -> impl Strategy<Value = u32> {
    prop_oneof![0..100_u32, 4000..4200_u32, 8100..8300_u32, 0..13_000_u32]
}

fn operation() -> impl Strategy<Value = Operation> {
    let count = || length().prop_map(to_usize);
    prop_oneof![
        6 => (length(), count(), count()).prop_map(|(at, n, same)| Operation::Note(at, n, same)),
        1 => length().prop_map(Operation::Unknown),
        3 => (0..3_usize, length()).prop_map(|(from, len)| Operation::Fork(from, len)),
        1 => Just(Operation::End),
    ]
}

/// Computes the keys of the full blocks of `tokens` from scratch.
fn keys(root: BlockKey, tokens: &[u32], size: u32) -> Vec<BlockKey> {
    let blocks = tokens.chunks_exact(to_usize(size));
    let chain = blocks.scan(root, |key, block| {
        *key = key.child(block, &[]);
        Some(*key)
    });
    chain.collect()
}

fn check(history: &mut History, plain: &[u32], (root, maps): (BlockKey, &[SlotMap])) {
    assert_eq!(to_usize(history.known()), plain.len());
    for (chain, map) in maps.iter().enumerate() {
        let expected = keys(root, plain, SIZES[chain]);
        let (mut found, count) = (Vec::new(), to_u32(expected.len()) + 1);
        history.each_full(chain, map, count, |content| {
            let begin = to_usize(content.index * SIZES[chain]);
            assert_eq!(content.tokens, &plain[begin..begin + to_usize(SIZES[chain])]);
            found.push(content.key);
            true
        });
        assert_eq!(found, expected);
        // The same, one by one.
        if let Some(last) = count.checked_sub(2) {
            let content = history.full(chain, map, last).unwrap();
            assert_eq!((content.key, content.index), (expected[to_usize(last)], last));
        }
        assert!(history.full(chain, map, count - 1).is_none());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn histories_equal_plain_lists(
        operations in prop::collection::vec((0..3_usize, operation()), 1..24),
    ) {
        let maps = SIZES.map(SlotMap::plain);
        let mut ledger = Ledger::new(7, 0);
        let options = StartOptions::default();
        let mut all: Vec<(History, Vec<u32>)> = Vec::new();
        let begin = |ledger: &mut Ledger| {
            let mut history = History::default();
            let space = ledger.join(b"", None);
            history.begin(Some(space), (&[], &options), (maps.len(), 1));
            (history, space.1)
        };
        let (first, root) = begin(&mut ledger);
        all.push((first, Vec::new()));
        all.extend((0..2).map(|_| (begin(&mut ledger).0, Vec::new())));
        let mut fresh = 0_u32;
        for (which, operation) in operations {
            let (history, plain) = &mut all[which];
            match operation {
                Operation::Note(at, count, same) => {
                    let begin = to_usize(at).min(plain.len() + 1);
                    let known = plain.get(begin..).unwrap_or_default();
                    let mut brought: Vec<_> = known.iter().copied().take(count.min(same)).collect();
                    while brought.len() < count {
                        fresh += 1;
                        brought.push(fresh);
                    }
                    history.note(to_u32(begin), Some(&brought), &maps);
                    let is_known = known.starts_with(&brought);
                    if begin <= plain.len() && !is_known {
                        plain.truncate(begin);
                        plain.extend(brought);
                    }
                }
                Operation::Unknown(at) => {
                    history.note(at, None, &maps);
                    plain.truncate(to_usize(at));
                }
                Operation::Fork(from, len) => {
                    if from != which {
                        let [child, parent] = all.get_disjoint_mut([which, from]).unwrap();
                        child.0.end(&mut ledger);
                        child.0.clear();
                        child.0.fork_from(&parent.0, (len, &maps), &mut ledger);
                        child.1 = parent.1.get(..to_usize(len)).unwrap_or(&parent.1).to_vec();
                    }
                }
                Operation::End => {
                    history.end(&mut ledger);
                    history.clear();
                    (*history, _) = begin(&mut ledger);
                    plain.clear();
                }
            }
            for (history, plain) in &mut all {
                check(history, plain, (root, &maps));
            }
        }
    }
}
