//! Logits of every port and of candle-transformers.
use std::collections::BTreeMap;
use std::sync::LazyLock;

use kv_candle::kv::KvFormat;

use crate::models::{self, Model, SHORT, Shape};
use crate::run::{Logits, Ported, apart, as_candle, largest, run};

const PROMPT: usize = 17;
const DECODED: usize = 32;

/// Returns how far the logits of a port may be from candle's, relative to the largest one.
///
/// Both round to f32, at other places. The error of candle's own logits is that of a plain
/// computation: it is measured against f64, as the largest over all logits of some texts, so that
/// no lucky one decides. A port may have twice that error, so it differs from candle by three times
/// as much at most.
pub(crate) fn tolerance(model: &Model) -> f64 {
    static PLAIN_ERRORS: LazyLock<BTreeMap<&str, f64>> = LazyLock::new(|| {
        models::all(SHORT).iter().map(|model| (model.name, plain_error(model))).collect()
    });
    3.0 * PLAIN_ERRORS.get(model.name).unwrap()
}

/// Returns the error of candle's logits, relative to the largest one.
fn plain_error(model: &Model) -> f64 {
    let error = |seed| {
        let text = models::text(seed, PROMPT + DECODED);
        let exact = (model.exact)(&text).split_off(PROMPT - 1);
        let plain = as_candle((model.theirs)(), &text, PROMPT);
        apart(&plain, &exact) / largest(&exact)
    };
    let worst = (1..=3).map(error).fold(0.0, f64::max);
    assert!(worst > 1e-8 && worst < 1e-5, "{}: {worst} is no rounding of f32", model.name);
    worst
}

#[track_caller]
#[expect(clippy::print_stdout, reason = "a failing test shows it")]
pub(crate) fn assert_close(what: &str, got: &[Logits], expected: &[Logits], tolerance: f64) {
    let (apart, most) = (apart(got, expected), largest(expected));
    println!("{what}: {:.1e} of the largest logit apart, {tolerance:.1e} allowed", apart / most);
    assert!(apart <= tolerance * most, "{what}: {apart} apart, the largest is {most}");
}

#[test]
fn prefill_and_decode_are_those_of_candle() {
    for model in models::all(SHORT) {
        let tolerance = tolerance(&model);
        let text = models::text(1, PROMPT + DECODED);
        let expected = as_candle((model.theirs)(), &text, PROMPT);
        let mut ported = Ported::new(&model, KvFormat::F32, 16);
        let mut got = vec![ported.one(0, &text[..PROMPT])];
        got.extend(text[PROMPT..].iter().map(|token| ported.one(0, &[*token])));
        assert_close(model.name, &got, &expected, tolerance);
        let exact = (model.exact)(&text).split_off(PROMPT - 1);
        assert_close(&format!("{} in f64", model.name), &got, &exact, tolerance * 2.0 / 3.0);

        // The test sees a key: without the first token the last logits are others.
        let without = Ported::new(&model, KvFormat::F32, 16).one(0, &text[1..]);
        let differs = apart(&[without], &expected[DECODED..]) / largest(&expected);
        assert!(differs > 100.0 * tolerance, "{}: {differs}", model.name);
    }
}

/// Four sequences of other lengths, of which one comes late, against each alone in candle.
#[test]
fn a_ragged_batch_is_each_sequence_alone_in_candle() {
    for model in models::all(SHORT) {
        let tolerance = tolerance(&model);
        let prompts = [9, 1, 30, 14];
        let texts: Vec<_> = (0..).zip(prompts).map(|(i, n)| models::text(i, n + 8)).collect();
        let mut ported = Ported::new(&model, KvFormat::F32, 64);
        let mut got = vec![Vec::new(); 4];
        for round in 0_usize..10 {
            let mut new: Vec<(u64, &[u32])> = Vec::new();
            for (at, (text, prompt)) in (0..).zip(texts.iter().zip(prompts)) {
                // The last one comes in the third round; the others have left by the end.
                let begin = if at == 3 { 2 } else { 0 };
                match round.checked_sub(begin) {
                    Some(0) => new.push((at, &text[..prompt])),
                    Some(more @ 1..8) => new.push((at, &text[prompt + more - 1..][..1])),
                    _ => {}
                }
            }
            for (logits, (at, _)) in ported.step(&new).into_iter().zip(&new) {
                got[usize::try_from(*at).unwrap()].push(logits);
            }
        }
        for ((got, text), prompt) in got.iter().zip(&texts).zip(prompts) {
            let expected = as_candle((model.theirs)(), &text[..prompt + 7], prompt);
            let what = format!("{}, {prompt} tokens", model.name);
            assert_close(&what, got, &expected, tolerance);
        }
    }
}

/// The mask of candle's mistral lets a query see one key more than Hugging Face's in the prefill,
/// and is missing in a decode step. So it computes every text whole, with a window that is smaller
/// by one. candle's phi3 has no window at all.
#[test]
fn a_sliding_window_of_w_is_w_tokens_in_decode_too() {
    let shape = Shape { window: Some(6), ..SHORT };
    for model in models::all(shape) {
        if model.windowed.0.is_empty() {
            continue;
        }
        let tolerance = tolerance(&model);
        let text = models::text(5, 40);
        let mut ported = Ported::new(&model, KvFormat::F32, 32);
        let mut got = vec![ported.one(0, &text[..20])];
        got.extend(text[20..].iter().map(|token| ported.one(0, &[*token])));
        let exact = (model.exact)(&text).split_off(19);
        assert_close(&format!("{} in f64", model.name), &got, &exact, tolerance * 2.0 / 3.0);
        if model.name != "phi3" {
            let whole = |len: usize| run(&mut (model.theirs)(), &text[..len], 0).unwrap();
            let expected: Vec<_> = (20..=40).map(whole).collect();
            assert_close(model.name, &got, &expected, tolerance);
        }

        // The window matters.
        let wide = models::all(SHORT).into_iter().find(|wide| wide.name == model.name).unwrap();
        let wide = Ported::new(&wide, KvFormat::F32, 32).one(0, &text);
        assert!(apart(&[wide], &got[20..]) > 100.0 * tolerance * largest(&got));
    }
}
