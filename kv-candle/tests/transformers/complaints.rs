//! What users of candle's caches reported or asked for, one test each. The name says the complaint.
use kv_candle::Error;
use kv_candle::kv::error::CacheError;
use kv_candle::kv::{KvFormat, SequenceId, StartOptions, StepInput};

use crate::models::{self, text};
use crate::parity::{assert_close, tolerance};
use crate::run::{Ported, apart, as_candle, largest, run};

/// candle#1918, candle#2937, candle-vllm#6: the first prompt left its shapes behind.
#[test]
fn a_second_prompt_on_one_model_breaks() {
    let model = models::llama();
    let tolerance = tolerance();
    let mut ported = Ported::new(&model, KvFormat::F32, 32);
    ported.one(0, &text(1, 20));
    ported.one(0, &text(2, 1));
    let second = text(3, 9);
    let got = ported.one(1, &second);
    let expected = as_candle((model.theirs)(), &second, 9);
    assert_close("llama", &[got], &expected, tolerance);
    // What the issue shows: the mask is that of the second prompt, the keys are of both.
    let mut theirs = (model.theirs)();
    run(&mut theirs, &text(1, 20), 0).unwrap();
    assert!(run(&mut theirs, &text(3, 9), 0).is_err());
}

/// candle#2108, candle#3743: the mask was that of the chunk, the keys were those of everything.
#[test]
fn a_prompt_in_chunks_fails() {
    let model = models::llama();
    let tolerance = tolerance();
    let prompt = text(4, 40);
    let mut ported = Ported::new(&model, KvFormat::F32, 32);
    let mut rest = prompt.as_slice();
    let mut got = Vec::new();
    for chunk in [7, 1, 16, 3, 13] {
        let (now, later) = rest.split_at(chunk);
        got = ported.one(0, now);
        rest = later;
    }
    assert!(rest.is_empty());
    let expected = as_candle((model.theirs)(), &prompt, 40);
    assert_close("llama", &[got], &expected, tolerance);
}

/// candle#3236: the mask of a second turn was wrong, and K and V could not be kept for a third.
#[test]
fn turn_two_after_a_cached_history_is_wrong() {
    let model = models::llama();
    let tolerance = tolerance();
    let talk = text(5, 60);
    let mut ported = Ported::new(&model, KvFormat::F32, 64);
    ported.one(0, &talk[..12]);
    for token in &talk[12..20] {
        ported.one(0, &[*token]);
    }
    // The second turn is tried twice: once in a fork, and once after that fork is dropped.
    let kv = ported.cache.kv_mut();
    kv.fork(SequenceId(0), SequenceId(1)).unwrap();
    let first = ported.one(1, &talk[20..45]);
    ported.cache.kv_mut().release(SequenceId(1)).unwrap();
    let second = ported.one(0, &talk[20..45]);
    assert_eq!(first, second);
    // A turn that is taken back, and another in its place.
    ported.cache.kv_mut().truncate(SequenceId(0), 20).unwrap();
    let other: Vec<_> = talk[..20].iter().chain(&talk[45..]).copied().collect();
    let third = ported.one(0, &talk[45..]);
    for (got, text) in [(second, &talk[..45]), (third, &other)] {
        let expected = as_candle((model.theirs)(), text, text.len());
        assert_close("llama", &[got], &expected, tolerance);
    }
}

/// candle#3879: the mask ignored the batch. Its positions are one number for a batch.
#[test]
fn a_batch_of_two_lengths_cannot_be_said() {
    let model = models::llama();
    let tolerance = tolerance();
    let [long, short] = [text(6, 31), text(7, 4)];
    let mut ported = Ported::new(&model, KvFormat::F32, 32);
    let got = ported.step(&[(0, &long[..30]), (1, &short[..3])]);
    let more = ported.step(&[(0, &long[30..]), (1, &short[3..])]);
    for (at, text) in [&long, &short].into_iter().enumerate() {
        let expected = as_candle((model.theirs)(), text, text.len() - 1);
        let got = [got[at].clone(), more[at].clone()];
        assert_close("llama", &got, &expected, tolerance);
    }
}

/// candle#3901: the cache sat in the layers, so that a model served one conversation.
#[test]
fn nobody_can_reset_the_cache() {
    let model = models::llama();
    let mut ported = Ported::new(&model, KvFormat::F32, 32);
    let prompt = text(8, 25);
    let fresh = ported.one(0, &prompt);
    ported.step(&[(0, &[1]), (1, &[2, 3])]);
    ported.cache.kv_mut().reset().unwrap();
    let usage = ported.cache.kv().state().usage();
    assert_eq!((usage.sequences, usage.tokens, usage.blocks_used), (0, 0, 0));
    assert_eq!(ported.one(0, &prompt), fresh);
}

/// mistral.rs#44, candle#2070: no limit holds. A pool does not grow: a step that needs more blocks
/// than it has changes nothing, and blocks of texts that have ended serve the next.
#[test]
fn memory_grows_over_many_texts() {
    let model = models::llama();
    let mut ported = Ported::new(&model, KvFormat::F32, 32);
    let bytes = ported.cache.kv().state().spec().memory().bytes_total;
    assert_eq!(bytes, 128 * 3 * 2 * 2 * 8 * 4, "tokens, layers, K and V, heads, dim, bytes of f32");
    let mut tokens = 0;
    for request in 0_u64.. {
        let prompt = text(request, 120);
        let logits = ported.one(request, &prompt);
        ported.one(request, &[1]);
        tokens += 121;
        if tokens > 10_000 {
            let expected = as_candle((model.theirs)(), &prompt, 120);
            assert_close("llama", &[logits], &expected, tolerance());
            break;
        }
        ported.cache.kv_mut().release(SequenceId(request)).unwrap();
        assert_eq!(ported.cache.kv().state().usage().blocks_used, 0);
    }
    let id = SequenceId(99_999);
    ported.cache.kv_mut().start(id, &[], StartOptions::default()).unwrap();
    let before = ported.cache.kv().state().usage();
    let refused = ported.cache.step(&[StepInput::count(id, 9)]).err();
    assert!(matches!(refused, Some(Error::Cache(CacheError::Exhausted(_)))), "{refused:?}");
    assert_eq!((ported.cache.kv().state().usage(), before.blocks_total), (before, 32));
}

/// candle#3577, mistral.rs#971: a cache of 8 or 4 bits. A value in 8 bits is wrong by half a step
/// at most, 1/254 of the largest value of its row; K and V of three layers add six such errors to
/// the logits. 4 bits have 16 times fewer levels, and twice that is allowed, because these levels
/// are not evenly spaced.
#[test]
fn the_cache_has_sixteen_bits_a_value_or_more() {
    let model = models::llama();
    let text = text(10, 60);
    let run = |format: &str| {
        let mut ported = Ported::new(&model, format.parse().unwrap(), 32);
        let mut logits = vec![ported.one(0, &text[..40])];
        logits.extend(text[40..].iter().map(|token| ported.one(0, &[*token])));
        (logits, ported.cache.kv().state().spec().memory().bytes_per_token)
    };
    let (full, bytes) = run("f32");
    let (eight, bytes_of_8) = run("int8");
    let (four, bytes_of_4) = run("l4");
    let error = |got: &[_]| apart(got, &full) / largest(&full);
    let (eight, four) = (error(&eight), error(&four));
    println!("{eight:.1e} of the largest logit by 8 bits, {four:.1e} by 4");
    // A row of 8 values and its scale in 16 bits.
    assert_eq!((bytes_of_8 * 32, bytes_of_4 * 32), (bytes * 10, bytes * 6));
    assert!(eight > tolerance() && eight < 6.0 / 254.0, "{eight}");
    assert!(four > eight && four < 2.0 * 16.0 * eight, "{four}, {eight}");
}
