//! Prefix reuse between prompts, while they run and after.
use super::*;

/// Prompts after a system prompt of `shared` tokens.
fn after_system_prompt(shared: u32, count: u32) -> Vec<Vec<u32>> {
    let system: Vec<_> = (0..shared).map(|i| (i * 7 + 3) % VOCAB).collect();
    let own = |i: u32| [i, i + 9, i + 1].into_iter().take(to_usize(1 + i % 3));
    (0..count).map(|i| system.iter().copied().chain(own(i)).collect()).collect()
}

fn check(generated: &[Generated], prompts: &[Vec<u32>], new: usize) {
    assert_eq!(generated.len(), prompts.len());
    for (generated, prompt) in generated.iter().zip(prompts) {
        assert_eq!(generated.tokens, expected(prompt, new));
    }
}

fn computed(model: &Echo) -> u32 {
    model.batches.iter().flatten().map(|chunk| chunk.tokens).sum()
}

#[test]
fn prompts_that_arrive_together_compute_their_prefix_once() {
    let prompts = after_system_prompt(64, 5);
    let own: u32 = prompts.iter().map(|prompt| to_u32(prompt.len()) - 64).sum();
    let (generated, stats, model) =
        run(cache(16, 100), requests(&prompts, 3), limits(8, 1000)).expect("runs");
    check(&generated, &prompts, 3);
    let first: u32 = model.batches[0].iter().map(|chunk| chunk.tokens).sum();
    assert_eq!(model.batches[0].len(), 5, "all come in with the first step");
    assert_eq!(first, 64 + own);
    assert_eq!(generated.iter().map(|g| g.reused).collect::<Vec<_>>(), [0, 64, 64, 64, 64]);
    assert_eq!((stats.cache.hit_tokens, stats.cache.hit_blocks), (4 * 64, 4 * 4));
    assert_eq!(stats.blocks_peak, 4 + 5, "each has one block of its own");
    assert!((stats.hit_ratio() - 256.0 / f64::from(5 * 64 + own)).abs() < 1e-12);
}

/// Without sharing two of them fit, with five blocks each.
#[test]
fn prompts_that_share_blocks_arrive_together_where_only_shared_ones_fit() {
    let prompts = after_system_prompt(64, 5);
    let (generated, stats, model) =
        run(cache(16, 10), requests(&prompts, 3), limits(8, 1000)).expect("runs");
    check(&generated, &prompts, 3);
    assert_eq!((model.batches[0].len(), stats.blocks_peak, stats.preemptions), (5, 9, 0));
}

#[test]
fn requests_wait_for_a_prompt_in_chunks() {
    let prompts = after_system_prompt(64, 3);
    let (generated, _, model) =
        run(cache(16, 100), requests(&prompts, 3), limits(8, 20)).expect("runs");
    check(&generated, &prompts, 3);
    assert!(model.batches.iter().all(|b| b.iter().map(|c| c.tokens).sum::<u32>() <= 20));
    // No request computes the system prompt again.
    let own: u32 = prompts.iter().map(|prompt| to_u32(prompt.len()) - 64).sum();
    assert_eq!(computed(&model), 64 + own + 3 * 2);
}

#[test]
fn a_finished_sequence_is_reused_to_the_token() {
    let prompts = after_system_prompt(21, 3);
    let (generated, stats, model) =
        run(cache(16, 100), requests(&prompts, 4), limits(1, 1000)).expect("runs");
    check(&generated, &prompts, 4);
    assert_eq!(generated.iter().map(|g| g.reused).collect::<Vec<_>>(), [0, 21, 21]);
    assert_eq!(stats.reused(), (2 * 16, 2 * 5));
    assert!(stats.cache.cow_copies >= 2, "{:?}", stats.cache);
    let own: u32 = prompts.iter().map(|prompt| to_u32(prompt.len()) - 21).sum();
    assert_eq!(computed(&model), 21 + own + 3 * 3);
}

#[test]
fn without_reuse_every_prompt_is_computed_whole() {
    let prompts = after_system_prompt(64, 4);
    let cache = cache_with(16, 100, |spec| spec.prefix_reuse(PrefixReuse::Off));
    let (generated, stats, model) =
        run(cache, requests(&prompts, 3), limits(2, 1000)).expect("runs");
    check(&generated, &prompts, 3);
    assert!(generated.iter().all(|generated| generated.reused == 0));
    assert_eq!((stats.cache.hit_tokens, stats.blocks_cached), (0, 0));
    let all: u32 = prompts.iter().map(|prompt| to_u32(prompt.len())).sum();
    assert_eq!(computed(&model), all + 4 * 2);
}

#[test]
fn a_preempted_request_reuses_its_cached_blocks() {
    // Two sequences of 40 + 29 tokens need 18 blocks each at the end; there are 30.
    let prompts = vec![vec![1; 40], vec![2; 40]];
    for reuse in [PrefixReuse::Off, PrefixReuse::FullBlocks, PrefixReuse::Partial] {
        let cache = cache_with(4, 30, |spec| spec.prefix_reuse(reuse));
        let (generated, stats, _) =
            run(cache, requests(&prompts, 30), limits(2, 1000)).expect("runs");
        check(&generated, &prompts, 30);
        assert!(stats.preemptions > 0);
        let resumed = stats.cache.resumed_hit_tokens;
        assert_eq!(resumed > 0, reuse != PrefixReuse::Off, "{resumed}");
        assert_eq!(stats.cache.hit_tokens, 0, "a second start is no hit of a prompt");
    }
}

#[test]
fn many_prompts_through_a_small_pool_evict_and_stay_right() {
    for (block_size, num_blocks) in [(4, 22), (8, 12), (3, 30)] {
        for (shared, max_batch) in [(0, 3), (13, 4), (40, 2)] {
            let prompts = after_system_prompt(shared, 12);
            let (generated, stats, _) =
                run(cache(block_size, num_blocks), requests(&prompts, 25), limits(max_batch, 17))
                    .expect("runs");
            check(&generated, &prompts, 25);
            assert!(stats.cache.evictions > 0, "{:?}", stats.cache);
        }
    }
}

#[test]
fn contiguous_blocks_are_reused_in_part() {
    let prompts = after_system_prompt(30, 4);
    let spec = CacheSpec::builder().layers(LAYERS).kv_heads(1).head_dim(CONTEXT);
    let spec = spec.publish_at(PublishAt::Begin).contiguous(2, CONTEXT).build().expect("spec");
    let cache = KvCache::new(cpu(), spec).expect("cache");
    let (generated, stats, _) = run(cache, requests(&prompts, 9), limits(2, 1000)).expect("runs");
    check(&generated, &prompts, 9);
    assert_eq!(generated[3].reused, 30);
    assert!(stats.reused().1 >= 30 && stats.reused().0 == 0);
}
