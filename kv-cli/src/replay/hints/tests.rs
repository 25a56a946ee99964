//! Hints against those worked out by hand, and what a policy hears of them.
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kv::BlockId;
use kv::eviction::{BlockInfo, Eviction, EvictionPolicy, Lru, Priority};

use super::*;
use crate::replay::policy::Policy;
use crate::replay::run::{Position, replay, replay_by};
use crate::replay::source::tests::lines;
use crate::replay::tests::Random;
use crate::replay::trace::Sizes;

/// Makes a trace of requests at these seconds: ids of 512 tokens, of which the last one has `last`.
fn trace_at(requests: &[(u64, usize, &[u64])]) -> Arc<Trace> {
    let line = |(seconds, last, ids): &(u64, usize, &[u64])| {
        let tokens = 512 * (ids.len() - 1) + last;
        let time = format!(r#""timestamp": {}"#, seconds * 1000);
        format!(r#"{{{time}, "input_length": {tokens}, "output_length": 0, "hash_ids": {ids:?}}}"#)
    };
    read(&requests.iter().map(line).collect::<Vec<_>>().join("\n"))
}

fn read(text: &str) -> Arc<Trace> {
    Arc::new(Trace::from_lines(lines(text), None, Sizes::default()).expect("a trace"))
}

fn within(seconds: u64) -> Return {
    Return::Within(Duration::from_secs(seconds))
}

/// Conversations of many lengths after one system prompt, none of which returns after the time that
/// another one does.
fn conversations(count: u64) -> Arc<Trace> {
    let mut requests = Vec::new();
    for chat in 0..count {
        let first = 10 + 10 * chat;
        requests.push((chat, vec![1, first, first + 1]));
        requests.push((3 * count + 2 * chat, vec![1, first, first + 2, first + 3]));
    }
    requests.sort_by_key(|(seconds, _)| *seconds);
    let requests: Vec<_> =
        requests.iter().map(|(seconds, ids)| (*seconds, 100, ids.as_slice())).collect();
    trace_at(&requests)
}

#[test]
fn sources_are_read_as_written_and_others_are_refused() {
    for text in ["oracle", "noisy=0", "noisy=0.25", "noisy=1"] {
        assert_eq!(text.parse::<HintSource>().expect(text).to_string(), text);
    }
    for share in ["", "-0.1", "1.01", "NaN", "inf", "half"] {
        let refused = format!("noisy={share}").parse::<HintSource>().expect_err(share);
        assert_eq!(refused, HintSourceError::Share { got: share.to_owned() });
    }
    for other in ["", "noisy", "oracle=1", "trace"] {
        let refused = other.parse::<HintSource>().expect_err(other).to_string();
        let expected = format!("unknown source of hints {other:?}, expected one of oracle, noisy=");
        assert!(refused.starts_with(&expected), "{refused}");
    }
}

#[test]
fn the_oracle_knows_when_a_conversation_goes_on() {
    let trace = trace_at(&[
        (0, 100, &[1, 10, 11]),         // goes on at 5
        (1, 100, &[1, 20, 21]),         // another one, which ends
        (5, 100, &[1, 10, 12, 13]),     // goes on at 9
        (6, 100, &[1, 30, 31]),         // asked again at 8
        (8, 100, &[1, 30, 31]),         // ends
        (9, 512, &[1, 10, 12, 14, 15]), // whole; goes on at 19
        (19, 512, &[1, 10, 12, 14, 15, 16]),
        (20, 512, &[1, 10, 12, 14, 15, 17]), // another answer to the same text
        (30, 512, &[1]),                     // only what all share
        (31, 512, &[1]),
    ]);
    let expected = [
        within(5),
        Return::Ended,
        within(4),
        within(2),
        Return::Ended,
        within(10),
        Return::Ended,
        Return::Ended,
        Return::Ended,
        Return::Ended,
    ];
    assert_eq!(oracle(&trace), expected);
    let hints = Hints::new(&trace, Some(HintSource::Oracle));
    assert_eq!(
        (hints.source(), hints.of(2), hints.of(10)),
        (Some("oracle"), Some(within(4)), None)
    );
}

#[test]
fn traces_of_lengths_end_every_conversation() {
    let csv = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,33,44\n\
               2023-11-16 18:15:47,0,1\n";
    assert_eq!(oracle(&read(csv)), [Return::Ended; 2]);
}

#[test]
fn a_clock_that_goes_back_is_no_time() {
    let trace = trace_at(&[(9, 100, &[1, 2]), (4, 100, &[1, 3, 4])]);
    assert_eq!(oracle(&trace), [within(0), Return::Ended]);
}

#[test]
fn noise_has_the_asked_share() {
    let trace = conversations(1000);
    let right = oracle(&trace);
    let goes_on = right.iter().filter(|hint| **hint != Return::Ended).count();
    assert_eq!((right.len(), goes_on), (2000, 1000));
    assert_eq!(mixed_up(&right, 0.0), right);
    // Of two requests that end, the hints are the same.
    for (share, least, most) in [(0.1, 0.06, 0.09), (0.5, 0.35, 0.40), (1.0, 0.72, 0.78)] {
        let noisy = mixed_up(&right, share);
        assert!(noisy.iter().all(|hint| right.contains(hint)), "hints are those of others");
        let wrong = noisy.iter().zip(&right).filter(|(a, b)| a != b).count();
        let wrong = to_f64(to_u64(wrong)) / 2000.0;
        assert!(wrong > least && wrong < most, "{share}: {wrong}");
        assert_eq!(mixed_up(&right, share), noisy, "the same every time");
    }
    let all_differ: Vec<_> = (0..500).map(within).collect();
    let noisy = mixed_up(&all_differ, 1.0);
    assert!(noisy.iter().zip(&all_differ).all(|(a, b)| a != b), "never the request's own");
    assert_eq!(mixed_up(&[Return::Idle], 1.0), [Return::Idle], "there is no other one");
}

#[test]
fn a_trace_has_hints_of_its_own_unless_others_are_asked_for() {
    let line = |hint: &str| {
        let lengths = r#""timestamp": 0, "input_length": 9, "output_length": 0"#;
        format!(r#"{{{lengths}, "hash_ids": [7]{hint}}}"#)
    };
    let named = |hint: &str| line(&format!(r#", "return": {hint}"#));
    let texts = [named("\"tool-call\""), line(""), named("\"within=2.5\""), named("null")];
    let trace = read(&texts.join("\n"));
    let own = Hints::new(&trace, None);
    let said = [Some(Return::ToolCall), None, Some(Return::Within(Duration::from_millis(2500)))];
    assert_eq!((own.source(), own.each[..3].to_vec()), (Some("trace"), said.to_vec()));
    assert_eq!(own.of(3), None);
    let oracle = Hints::new(&trace, Some(HintSource::Oracle));
    assert_eq!((oracle.of(0), oracle.of(3)), (Some(within(0)), Some(Return::Ended)));
    let silent = Hints::new(&read(&line("")), None);
    assert_eq!((silent.source(), silent.of(0)), (None, None));
    for wrong in ["\"later\"", "\"tool_call\"", "7"] {
        let text = [line(""), named(wrong)].join("\n");
        let refused = Trace::from_lines(lines(text), None, Sizes::default()).expect_err(wrong);
        assert_eq!(refused.to_string(), "line 2");
    }
    let refused = Trace::from_lines(lines(named("\"later\"")), None, Sizes::default());
    let refused = refused.expect_err("no hint").error.to_string();
    assert!(refused.starts_with("return: unknown return hint \"later\""), "{refused}");
}

type Heard = Arc<Mutex<Vec<(usize, Option<Return>)>>>;

/// The least recent first, with a record of the hints and the requests that gave them.
#[derive(Debug)]
struct Listening {
    inner: Lru,
    position: Position,
    heard: Heard,
}

impl EvictionPolicy for Listening {
    fn stored(&mut self, block: BlockId, info: &BlockInfo) {
        self.inner.stored(block, info);
    }
    fn reused(&mut self, block: BlockId) {
        self.inner.reused(block);
    }
    fn held(&mut self, block: BlockId) {
        self.inner.held(block);
    }
    fn hinted(&mut self, _: BlockId, hint: Option<Return>) {
        self.heard.lock().expect("no panic").push((self.position.get(), hint));
    }
    fn idle(&mut self, block: BlockId) {
        self.inner.idle(block);
    }
    fn dropped(&mut self, block: BlockId) {
        self.inner.dropped(block);
    }
    fn set_priority(&mut self, block: BlockId, priority: Priority) {
        self.inner.set_priority(block, priority);
    }
    fn evict(&mut self) -> Option<BlockId> {
        self.inner.evict()
    }
}

#[test]
fn the_policy_hears_the_hint_of_every_request() {
    let trace = conversations(20);
    let hints = Hints::new(&trace, Some(HintSource::Noisy(0.3)));
    let heard = Heard::default();
    let own = |num_blocks: u32, position: &Position| -> Option<Box<dyn EvictionPolicy>> {
        let (position, heard) = (position.clone(), Arc::clone(&heard));
        Some(Box::new(Listening { inner: Lru::new(num_blocks), position, heard }))
    };
    let case = (Policy::Real(Eviction::Lru), Some(12));
    let outcome = replay_by(&trace, case, (None, &hints), own, |_| {}).expect("a replay");
    let plain = replay(&trace, case, (None, &Hints::default()), |_| {}).expect("a replay");
    assert_eq!((outcome.hit_tokens, outcome.evictions), (plain.hit_tokens, plain.evictions));
    let heard = heard.lock().expect("no panic");
    for request in 0..trace.requests().len() {
        let said: Vec<_> = heard.iter().filter(|(of, _)| *of == request).collect();
        assert!(said.len() >= 3, "request {request}: {said:?}");
        let last = said.last().expect("some");
        assert_eq!(last.1, hints.of(request), "request {request}");
    }
    let all = heard.iter().filter(|(of, hint)| *hint == hints.of(*of)).count();
    assert_eq!(all, heard.len(), "no other hint is heard");
}

/// Policies that do not learn from hints give the same figures with them.
#[test]
fn hints_change_nothing_for_policies_without_them() {
    let mut random = Random(13);
    for _ in 0..20 {
        let ids = random.prefixes(30, 6);
        let requests: Vec<_> =
            ids.iter().zip(0..).map(|(ids, at)| (at, 512, ids.as_slice())).collect();
        let trace = trace_at(&requests);
        let hints = Hints::new(&trace, Some(HintSource::Oracle));
        let policies = [Eviction::Lru, Eviction::Lfu, Eviction::Priority].map(Policy::Real);
        for policy in policies.into_iter().chain([Policy::Min]) {
            let run = |hints: &Hints| {
                let case = (policy, Some(8));
                let outcome = replay(&trace, case, (None, hints), |_| {}).expect("a replay");
                (outcome.hit_tokens, outcome.evictions, outcome.peak_blocks)
            };
            assert_eq!(run(&hints), run(&Hints::default()), "{policy}: {ids:?}");
        }
    }
}
