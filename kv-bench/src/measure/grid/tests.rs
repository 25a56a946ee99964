//! Tests of the grid: number, kind and size of its cases.
use super::*;

/// Options of one suite.
fn only(suite: Suite) -> Options {
    Options { suites: vec![suite], ..Options::default() }
}

fn of(options: &Options) -> Vec<Case> {
    cases(options, RunsOn::Cpu).expect("cases")
}

fn formats(names: &[&str]) -> Vec<Formats> {
    names.iter().map(|name| name.parse().expect("a format")).collect()
}

fn count(cases: &[Case], is_it: impl Fn(&Case) -> bool) -> usize {
    cases.iter().filter(|case| is_it(case)).count()
}

#[test]
fn a_star_has_each_axis_through_its_centre_once() {
    let cases = of(&only(Suite::Decode));
    // Batch by context, then heads, head dims, block sizes, and formats other than the centre's.
    assert_eq!(cases.len(), 9 + 4 + 3 + 2 + (KvFormat::all().len() - 1));
    for (index, case) in cases.iter().enumerate() {
        assert!(!cases[..index].contains(case), "{case:?}");
    }
    let centre = |case: &Case| {
        let Shape { batch, context, q_heads, kv_heads, head_dim, block_size, .. } = case.shape;
        (batch, context) == (16, 4096)
            && (q_heads, kv_heads, head_dim) == (32, 8, 128)
            && block_size == BlockSize::Tokens(16)
    };
    let is_bf16 = |case: &Case| case.stored == Formats::from(KvFormat::Bf16);
    assert_eq!(count(&cases, |case| centre(case) && is_bf16(case)), 1);
    assert_eq!(count(&cases, centre), KvFormat::all().len());
    for batch in [1, 16, 64] {
        for context in [512, 4096, 32_768] {
            let has = |case: &Case| case.shape.batch == batch && case.shape.context == context;
            assert!(count(&cases, has) > 0, "{batch} x {context}");
        }
    }
    for (q_heads, kv_heads) in [(32, 32), (32, 4), (32, 2), (40, 8)] {
        let has = |case: &Case| (case.shape.q_heads, case.shape.kv_heads) == (q_heads, kv_heads);
        assert_eq!(count(&cases, has), 1);
    }
    for head_dim in [64, 72, 80] {
        assert_eq!(count(&cases, |case| case.shape.head_dim == head_dim), 1);
    }
    assert_eq!(count(&cases, |case| case.block_size == 32), 1);
    assert_eq!(count(&cases, |case| case.block_size == 4096), 1, "contiguous");
}

#[test]
fn full_is_every_combination() {
    let cases = of(&Options { full: true, ..only(Suite::Decode) });
    assert_eq!(cases.len(), 9 * 5 * 4 * 3 * KvFormat::all().len());
    let cases = of(&Options {
        batch: vec![1, 2],
        context: vec![8],
        formats: formats(&["l4", "bf16", "l4"]),
        full: true,
        head_dim: vec![64],
        block_size: vec![BlockSize::Tokens(16), BlockSize::Contiguous],
        q_heads: vec![6],
        ..only(Suite::Gather)
    });
    // 6 query heads allow 6 kv heads, but not a fourth or an eighth of 6.
    assert_eq!(cases.len(), 2 * 2 * 2);
    assert!(cases.iter().all(|case| case.shape.kv_heads == 6));
    assert_eq!(cases[0].stored, Formats::from(KvFormat::Bf16), "the centre's first");
}

#[test]
fn lists_replace_axes() {
    let cases = of(&Options {
        batch: vec![3],
        context: vec![8, 9],
        formats: formats(&["l4"]),
        kv_heads: vec![8],
        head_dim: vec![128],
        block_size: vec![BlockSize::Tokens(16)],
        ..only(Suite::Decode)
    });
    let shapes: Vec<_> = cases.iter().map(|case| (case.shape.batch, case.shape.context)).collect();
    assert_eq!(shapes, [(3, 8), (3, 9)]);
}

#[test]
fn a_suite_has_its_operations() {
    let names = |suites: &[Suite]| {
        let operations = operations(suites);
        operations.iter().map(|operation| operation.name()).collect::<Vec<_>>()
    };
    let twice = [Suite::Append, Suite::Decode, Suite::Append];
    assert_eq!(names(&twice), ["append", "append-prompt", "decode"]);
    let all = ["decode", "prefill", "append", "append-prompt", "gather", "copy", "plan"];
    assert_eq!(names(&[Suite::All]), all);
    let cases = of(&only(Suite::All));
    let of = |name| count(&cases, |case| case.operation.name() == name);
    let arms = 2 + 1 + 2 + (KvFormat::all().len() - 1);
    assert_eq!(all.map(of), [9 + arms + 4, 9 + arms, 9 + arms, 4 + arms, 9 + arms, 9 + arms, 11]);
    let prompts = cases.iter().filter(|case| case.operation == Operation::AppendPrompt);
    assert!(prompts.clone().all(|case| case.shape.batch == 1));
    assert_eq!(prompts.map(|case| case.shape.context).min(), Some(64));
    let plans = cases.iter().filter(|case| case.operation == Operation::Plan);
    assert_eq!(plans.map(|case| case.shape.batch).max(), Some(1000));
}

#[test]
fn small_cases_have_layers_that_no_cache_holds() {
    let suites = vec![Suite::Decode, Suite::Append];
    let formats = formats(&["bf16", "l3"]);
    let cases = of(&Options { suites, formats, ..Options::default() });
    for case in &cases {
        let Shape { layers, batch, context, .. } = case.shape;
        let Work { read, written, .. } = case.work;
        let is_append = case.operation == Operation::Append;
        let stored = if case.operation == Operation::Decode { read } else { written };
        let bytes = stored * u64::from(layers);
        let is_capped = u64::from(layers) == u64::from(LAYERS_MAX);
        assert!(bytes >= COLD || is_capped || is_append, "{batch} x {context}: {layers}");
        assert!(case.memory > bytes, "{batch} x {context}");
    }
    let cases = of(&Options { layers: Some(3), ..only(Suite::Decode) });
    assert!(cases.iter().all(|case| case.shape.layers == 3));
}

#[test]
fn cases_of_one_shape_share_a_cache() {
    let cases = of(&Options {
        batch: vec![2],
        context: vec![8],
        formats: formats(&["bf16"]),
        kv_heads: vec![8],
        head_dim: vec![64],
        block_size: vec![BlockSize::Tokens(16)],
        ..only(Suite::All)
    });
    let names = |group: &Vec<usize>| {
        group.iter().map(|index| cases[*index].operation.name()).collect::<Vec<_>>()
    };
    let groups: Vec<_> = groups(&cases).iter().map(names).collect();
    let own = ["prefill", "append-prompt", "copy", "plan"];
    let mut expected = vec![vec!["decode", "append", "gather"]];
    expected.extend(own.map(|name| vec![name]));
    assert_eq!(groups, expected);
}

#[test]
fn a_software_driver_gets_small_cases() {
    let cases = cases(&only(Suite::Decode), RunsOn::Software).expect("cases");
    assert_eq!(cases.len(), 2 + 2 + 1 + 2 + 3);
    assert!(cases.iter().all(|case| case.shape.layers == 1 && case.shape.context == 128));
}
