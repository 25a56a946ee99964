//! The scheduler over a device that stores nothing and a model whose next token depends on every
//! token before it: what it generates is right only if each was brought once, in order, at its
//! position.
#![expect(clippy::arithmetic_side_effects, reason = "a test that overflows fails, as it should")]
use std::cell::RefCell;
use std::collections::HashMap;

use kv::backend::NullBackend;
use kv::{CacheSpec, QkvFormat, Step, TensorView};

use super::*;

const LAYERS: u16 = 2;
const VOCAB: u32 = 50;

/// Remembers what it was given for each position of each sequence.
#[derive(Default)]
struct Echo {
    histories: RefCell<HashMap<SequenceId, Vec<u32>>>,
    batches: RefCell<Vec<Vec<Chunk>>>,
}

/// The token that follows a history.
fn next(history: &[u32]) -> u32 {
    let hash = history.iter().fold(17_u32, |hash, token| {
        hash.wrapping_mul(31).wrapping_add(*token).wrapping_mul(0x9E37_79B1).rotate_left(7)
    });
    hash % VOCAB
}

impl Model<NullBackend> for Echo {
    fn forward(
        &self,
        step: &mut Step<'_, NullBackend>,
        batch: &Batch,
    ) -> anyhow::Result<Vec<Vec<f32>>> {
        let mut histories = self.histories.borrow_mut();
        self.batches.borrow_mut().push(batch.chunks.clone());
        let (mut at, mut logits) = (0, Vec::new());
        for chunk in &batch.chunks {
            let history = histories.entry(chunk.sequence).or_default();
            for _ in 0..chunk.tokens {
                let position = to_usize(step.positions()[at]);
                assert!(position <= history.len(), "{:?}: a token was left out", chunk.sequence);
                history.truncate(position);
                history.push(batch.tokens[at]);
                at += 1;
            }
            if chunk.wants_logits {
                let mut row = vec![0.0; to_usize(VOCAB)];
                row[to_usize(next(history))] = 1.0;
                logits.push(row);
            }
        }
        let rows = vec![0.0_f32; at];
        let dims = [to_u32(at), 1, 1];
        for layer in 0..LAYERS {
            let view = TensorView::host::<f32>(&rows, &dims);
            step.write(layer, view, view, QkvFormat::Thd)?;
        }
        Ok(logits)
    }
}

fn prompts(count: u32) -> Vec<Vec<u32>> {
    (0..count).map(|i| (0..3 + 7 * (i % 4)).map(|j| (i * 13 + j * 5) % VOCAB).collect()).collect()
}

fn requests(prompts: &[Vec<u32>], max_new_tokens: u32) -> Vec<Request> {
    let request = |(index, prompt): (usize, &Vec<u32>)| Request {
        prompt: prompt.clone(),
        max_new_tokens,
        sampler: Sampler::new(0.0, 0, index),
    };
    prompts.iter().enumerate().map(request).collect()
}

fn limits(max_batch: usize, max_step_tokens: usize) -> Limits {
    Limits { max_batch, max_step_tokens, context: 128, stop: Vec::new(), forget: false }
}

/// What must come out, from the rule alone.
fn expected(prompt: &[u32], new: usize) -> Vec<u32> {
    let mut history = prompt.to_vec();
    for _ in 0..new {
        history.push(next(&history));
    }
    history.split_off(prompt.len())
}

fn cache(block_size: u32, num_blocks: u32) -> KvCache<NullBackend> {
    let spec = CacheSpec::builder().layers(LAYERS).kv_heads(1).head_dim(1);
    let spec = spec.paged(block_size, num_blocks).build().expect("spec");
    KvCache::new(NullBackend::new(), spec).expect("cache")
}

fn run(
    cache: KvCache<NullBackend>,
    requests: Vec<Request>,
    limits: Limits,
) -> anyhow::Result<(Vec<Generated>, Stats, Echo)> {
    let model = Echo::default();
    let scheduler = Scheduler::new(cache, &model, limits);
    let (generated, stats) = scheduler.run(requests, &mut |_| Ok(()))?;
    Ok((generated, stats, model))
}

#[test]
fn every_pool_batch_and_chunk_gives_the_same_tokens() {
    let prompts = prompts(7);
    for (block_size, num_blocks) in [(1, 400), (1, 50), (4, 12), (4, 100), (16, 3), (128, 1)] {
        for max_batch in [1, 3, 16] {
            for max_step_tokens in [1, 5, 1000] {
                for forget in [false, true] {
                    let limits = Limits { forget, ..limits(max_batch, max_step_tokens) };
                    let cache = cache(block_size, num_blocks);
                    let (generated, stats, _) =
                        run(cache, requests(&prompts, 20), limits).expect("runs");
                    assert_eq!(generated.len(), prompts.len());
                    for (generated, prompt) in generated.iter().zip(&prompts) {
                        assert_eq!(generated.tokens, expected(prompt, 20));
                        assert_eq!(generated.finish, Finish::Length);
                    }
                    assert_eq!(stats.generated_tokens, 7 * 20);
                    assert!(stats.blocks_peak <= num_blocks);
                }
            }
        }
    }
}

#[test]
fn the_youngest_gives_way_and_comes_back() {
    // Two sequences of 3 + 29 tokens need 8 blocks each at the end; there are 9.
    let prompts = vec![vec![1, 2, 3], vec![4, 5, 6]];
    let (generated, stats, model) =
        run(cache(4, 9), requests(&prompts, 29), limits(2, 1000)).expect("runs");
    for (generated, prompt) in generated.iter().zip(&prompts) {
        assert_eq!(generated.tokens, expected(prompt, 29));
    }
    assert_eq!(stats.preemptions, 1);
    let batches = model.batches.borrow();
    let again = batches.iter().flatten().filter(|chunk| chunk.sequence == SequenceId(1));
    assert_eq!(again.filter(|chunk| chunk.tokens > 3).count(), 1, "one recomputation, at once");
}

#[test]
fn prefill_and_decode_share_steps_of_bounded_size() {
    let prompts = vec![vec![1; 3], vec![2; 40]];
    let (_, _, model) = run(cache(16, 8), requests(&prompts, 10), limits(2, 8)).expect("runs");
    let batches = model.batches.borrow();
    let size = |batch: &Vec<Chunk>| batch.iter().map(|chunk| chunk.tokens).sum::<u32>();
    assert!(batches.iter().all(|batch| size(batch) <= 8));
    let mixed = batches.iter().filter(|batch| {
        batch.iter().any(|chunk| chunk.tokens == 1) && batch.iter().any(|chunk| chunk.tokens > 1)
    });
    assert!(mixed.count() >= 4, "the short prompt decodes while the long one is read");
}

#[test]
fn no_more_than_max_batch_run_at_once() {
    let prompts = prompts(6);
    let (_, _, model) = run(cache(4, 1000), requests(&prompts, 5), limits(2, 1000)).expect("runs");
    assert!(model.batches.borrow().iter().all(|batch| batch.len() <= 2));
}

#[test]
fn a_stop_token_ends_its_sequence_and_is_kept() {
    let prompts = prompts(3);
    let stop = expected(&prompts[1], 4)[3];
    let limits = Limits { stop: vec![stop], ..limits(3, 1000) };
    let (generated, ..) = run(cache(4, 100), requests(&prompts, 30), limits).expect("runs");
    for (generated, prompt) in generated.iter().zip(&prompts) {
        let all = expected(prompt, 30);
        let end = all.iter().position(|token| *token == stop).map_or(30, |at| at + 1);
        assert_eq!(generated.tokens, all[..end]);
        let finish = if end == 30 && all[29] != stop { Finish::Length } else { Finish::Stop };
        assert_eq!(generated.finish, finish);
    }
}

#[test]
fn the_context_is_the_end() {
    let prompts = vec![vec![3; 120]];
    let (generated, ..) =
        run(cache(16, 8), requests(&prompts, 100), limits(1, 1000)).expect("runs");
    assert_eq!(generated[0].tokens.len(), 8);
    assert_eq!(generated[0].finish, Finish::Context);
}

#[test]
fn what_can_never_run_is_refused_before_anything_runs() {
    let refused = |prompts: &[Vec<u32>], new, num_blocks| {
        let result = run(cache(4, num_blocks), requests(prompts, new), limits(2, 1000));
        let error = result.err().expect("refused");
        error.downcast::<ScheduleError>().expect("typed")
    };
    let error = refused(&[vec![1], vec![2; 128]], 1, 1000);
    assert!(matches!(error, ScheduleError::PromptTooLong { index: 1, tokens: 128, context: 128 }));
    let error = refused(&[vec![1], vec![2; 20]], 10, 7);
    assert!(
        matches!(
            error,
            ScheduleError::DoesNotFit { index: 1, tokens: 29, needed: 8, available: 7 }
        ),
        "{error}"
    );
    assert!(error.to_string().contains("needs 8 blocks, the cache has 7"), "{error}");
    let error = refused(&[vec![]], 10, 7);
    assert!(matches!(error, ScheduleError::EmptyPrompt { index: 0 }));
    // It fits to the last block.
    run(cache(4, 8), requests(&[vec![2; 20]], 13), limits(2, 1000)).expect("32 cached tokens");
}

#[test]
fn a_failing_device_ends_the_run_with_its_error() {
    let spec = CacheSpec::builder().layers(LAYERS).kv_heads(1).head_dim(1).paged(4, 10);
    let backend = NullBackend::new();
    let control = backend.control();
    let cache = KvCache::new(backend, spec.build().expect("spec")).expect("cache");
    control.fail_after(5);
    let error = run(cache, requests(&prompts(1), 10), limits(1, 10)).err().expect("fails");
    assert!(matches!(error.downcast_ref::<CacheError>(), Some(CacheError::Device(_))), "{error}");
}

#[test]
fn sampling_does_not_depend_on_the_batch() {
    let sampled = |max_batch, num_blocks| {
        let mut requests = requests(&prompts(5), 20);
        for (index, request) in requests.iter_mut().enumerate() {
            request.sampler = Sampler::new(0.3, 42, index);
        }
        let (generated, stats, _) =
            run(cache(4, num_blocks), requests, limits(max_batch, 1000)).expect("runs");
        (generated.into_iter().map(|g| g.tokens).collect::<Vec<_>>(), stats.preemptions)
    };
    let (alone, _) = sampled(1, 1000);
    assert_eq!(sampled(5, 1000).0, alone);
    let (tight, preemptions) = sampled(5, 14);
    assert!(preemptions > 0);
    assert_eq!(tight, alone);
}
