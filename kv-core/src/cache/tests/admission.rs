//! Admission: a prompt is admitted exactly if all its chunks fit.
use super::reuse::{run, tokens};
use super::*;
use crate::num::to_usize;
use crate::spec::PrefixReuse;
use crate::{KvFormat, Scaling};

/// Number of group layouts to test.
const SHAPES: usize = 6;

fn build(shape: usize, num_blocks: u32) -> Option<KvCache<NullBackend>> {
    let spec = CacheSpec::builder().layers(2).kv_heads(1).head_dim(32);
    let spec = spec.format(KvFormat::Int8(Scaling::Row)).paged(4, num_blocks).max_seq_len(40);
    let spec = match shape {
        0 => spec,
        1 => spec.window_left(7),
        2 => spec.window_left(5).sink_tokens(3),
        3 => spec.group([1], |group| group.paged(3, num_blocks).window_left(9)),
        4 => spec.tail(true),
        _ => spec.tail(true).window_left(6),
    };
    let cache = spec.prefix_reuse(PrefixReuse::FullBlocks).build().ok()?;
    Some(KvCache::new(NullBackend::new(), cache).unwrap())
}

/// Computes a prompt in chunks; returns whether there were always enough blocks.
fn runs(cache: &mut KvCache<NullBackend>, prompt: &[u32], (chunk, ahead): (u32, u32)) -> bool {
    let reused = cache.start(SEQ[1], prompt, StartOptions::default()).unwrap();
    for (at, chunk) in prompt[to_usize(reused)..].chunks(to_usize(chunk)).enumerate() {
        let input =
            StepInput::tokens(SEQ[1], chunk).with_lookahead(if at == 0 { ahead } else { 0 });
        match cache.begin_step(&[input]) {
            Ok(mut step) => {
                write_all(&mut step).unwrap();
                step.commit().unwrap();
            }
            Err(CacheError::Exhausted(_)) => return false,
            Err(other) => panic!("{other}"),
        }
    }
    true
}

#[test]
fn a_prompt_is_admitted_exactly_if_all_its_chunks_fit() {
    let mut answers = [[0_u32; 2]; SHAPES];
    for (shape, counts) in answers.iter_mut().enumerate() {
        let sizes = [2, 3, 5, 7, 9, 12].into_iter();
        let cases = sizes.flat_map(|n| [1, 3, 8, 40].map(|c| (n, c)));
        let cases = cases.flat_map(|(n, c)| [3, 12, 13, 29].map(|len| (n, c, len)));
        for (num_blocks, chunk, len) in cases {
            for (others, ahead) in [(0, 0), (0, 3), (1, 0), (10, 0), (21, 0)] {
                let Some(mut cache) = build(shape, num_blocks) else { continue };
                let max = cache.state().spec().max_seq_len();
                if len.max(others) > max || (others > 0 && !warm(&mut cache, others)) {
                    continue;
                }
                let admission = Admission::default()
                    .with_chunk(chunk)
                    .with_lookahead(ahead)
                    .with_must_fit(true);
                let prompt = tokens(0..len);
                let said =
                    cache.state().check_admission(&prompt, StartOptions::default(), &admission);
                let before = cache.state().stats().duplicate_blocks;
                let fits = runs(&mut cache, &prompt, (chunk, ahead));
                // Admission does not count on blocks that are released because another one replaces
                // them.
                if fits && cache.state().stats().duplicate_blocks > before {
                    continue;
                }
                let place = format!(
                    "shape {shape}, {num_blocks} blocks, {len} tokens by {chunk}, {ahead} ahead, \
                     {others} before"
                );
                assert_eq!(said.is_ok(), fits, "{place}: {said:?}");
                counts[usize::from(fits)] += 1;
            }
        }
    }
    assert!(answers.iter().flatten().all(|n| *n > 0), "{answers:?}");
}

/// Runs another sequence with the same tokens, which stays live if their number is odd.
fn warm(cache: &mut KvCache<NullBackend>, len: u32) -> bool {
    cache.start(SEQ[0], &tokens(0..len), StartOptions::default()).unwrap();
    let Ok(mut step) = cache.begin_step(&[StepInput::tokens(SEQ[0], &tokens(0..len))]) else {
        return false;
    };
    write_all(&mut step).unwrap();
    step.commit().unwrap();
    if len.is_multiple_of(2) {
        cache.release(SEQ[0]).unwrap();
    }
    true
}

/// A complete prompt of whole blocks has no tail, but one step before its end it has one.
#[test]
fn a_tail_counts_until_it_is_quantised() {
    // 3 blocks of codes, and two of a tail while the last of them is filled; one belongs to another
    // sequence.
    for (num_blocks, fits) in [(5, false), (6, true)] {
        let mut cache = build(4, num_blocks).unwrap();
        assert!(warm(&mut cache, 1));
        let admission = Admission::default().with_chunk(1).with_must_fit(true);
        let said =
            cache.state().check_admission(&tokens(0..12), StartOptions::default(), &admission);
        assert_eq!(said.is_ok(), fits, "{said:?}");
        assert_eq!(runs(&mut cache, &tokens(0..12), (1, 0)), fits);
    }
}

/// Blocks that hold one wide row each are full with it.
#[test]
fn a_block_of_wide_rows_is_reused_whole() {
    let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(32);
    let spec = spec.format(KvFormat::Int8(Scaling::Row)).full_precision_prefix(3).paged(3, 12);
    let mut cache = KvCache::new(NullBackend::new(), spec.build().unwrap()).unwrap();
    run(&mut cache, SEQ[0], &tokens(0..6));
    cache.release(SEQ[0]).unwrap();
    for len in 1..7 {
        let id = SequenceId(u64::from(len));
        let mut prompt = tokens(0..len);
        prompt.push(99);
        assert_eq!(run(&mut cache, id, &prompt), len);
        check_invariants(cache.state());
        cache.release(id).unwrap();
    }
}
