//! Windows with slack: they keep more than queries see, so that sequences can be truncated.
use super::*;

fn window(slack: u32, num_blocks: u32) -> KvCache<NullBackend> {
    let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(2).paged(4, num_blocks);
    let spec = spec.window_left(6).sink_tokens(2).window_slack(slack);
    KvCache::new(NullBackend::new(), spec.build().unwrap()).unwrap()
}

/// Grows to `len` tokens, `chunk` per step.
fn grow(cache: &mut KvCache<NullBackend>, len: u32, chunk: u32) {
    while let Some(rest) =
        len.checked_sub(cache.state().seq_len(SEQ[0]).unwrap()).filter(|n| *n > 0)
    {
        append(cache, &[(SEQ[0], chunk.min(rest))]).unwrap();
    }
}

#[test]
fn a_sequence_is_truncated_by_the_slack() {
    for slack in [0, 1, 4, 9, 30] {
        for chunk in [1, 3, 8] {
            for len in [5, 17, 40, 61] {
                let mut cache = window(slack, 40);
                start(&mut cache, SEQ[0]);
                grow(&mut cache, len, chunk);
                let shortest = len.saturating_sub(slack);
                cache.truncate(SEQ[0], shortest).unwrap();
                assert_eq!(cache.state().seq_len(SEQ[0]), Some(shortest));
                check_invariants(cache.state());
                // The truncated sequence is complete: a query there sees its window.
                let query = [StepInput::query(SEQ[0], 1)];
                if shortest > 0 {
                    drop(cache.begin_step(&query).unwrap());
                }
                grow(&mut cache, len, chunk);
            }
        }
    }
}

#[test]
fn a_truncation_beyond_the_slack_is_refused_and_changes_nothing() {
    let mut cache = window(8, 40);
    start(&mut cache, SEQ[0]);
    grow(&mut cache, 60, 1);
    let before = books(cache.state());
    let refused = cache.truncate(SEQ[0], 40).unwrap_err();
    let CacheError::Plan(PlanError::OutOfWindow { kept, .. }) = refused else {
        panic!("{refused}")
    };
    assert_eq!(books(cache.state()), before);
    // The first kept token and the window before the next give the shortest length.
    assert!(cache.truncate(SEQ[0], kept + 5).is_err());
    cache.truncate(SEQ[0], kept + 6).unwrap();
}

#[test]
fn blocks_of_the_slack_are_counted() {
    for slack in [0, 3, 10] {
        let spec = window(slack, 40).state().spec().groups()[0].clone();
        for chunk in [1, 5] {
            let mut cache = window(slack, 40);
            let prompt: Vec<_> = (0..70).collect();
            let admission = Admission::default().with_chunk(chunk).with_must_fit(true);
            start(&mut cache, SEQ[0]);
            let mut most = 0;
            for at in (0..70).step_by(usize::try_from(chunk).unwrap()) {
                let ids = &prompt[at..at + usize::try_from(chunk).unwrap()];
                let inputs = [StepInput::tokens(SEQ[0], ids)];
                let demand = cache.state().blocks_for_step(GroupId(0), &inputs).unwrap();
                let lacks = cache.state().blocks_to_completion(GroupId(0), SEQ[0], 70).unwrap();
                let before = cache.state().free_blocks(GroupId(0));
                append(&mut cache, &[(SEQ[0], chunk)]).unwrap();
                let free = cache.state().free_blocks(GroupId(0));
                assert_eq!(demand.free - demand.needed, free, "slack {slack}, at {at}");
                assert!(chunk > 1 || before <= free + lacks, "slack {slack}, at {at}");
                most = most.max(40 - free);
            }
            if chunk == 1 {
                assert!(most <= spec.blocks_to_grow(70), "{most} blocks, slack {slack}");
            }
            // Admission counts exactly the held blocks.
            let admits = |blocks| {
                let cache = window(slack, blocks);
                cache.state().check_admission(&prompt, StartOptions::default(), &admission).is_ok()
            };
            assert!(admits(most) && !admits(most - 1), "{most} blocks, slack {slack}");
        }
    }
}
