//! Arguments that are accepted, and contradictions that are refused.
use super::super::{Cli, Command};
use super::*;
use crate::replay::Route;
use clap::Parser;

fn parse(args: &[&str]) -> Result<Option<TierOptions>, String> {
    let args = [&["kv", "replay", "trace.jsonl"], args].concat();
    let cli = Cli::try_parse_from(args).and_then(Cli::checked);
    match cli.map_err(|error| error.to_string())?.command {
        Command::Replay(args) => args.tiers().map_err(|error| error.to_string()),
        other => Err(format!("{other:?}")),
    }
}

fn fleet(args: &[&str]) -> Result<Option<FleetOptions>, String> {
    let args = [&["kv", "replay", "trace.jsonl"], args].concat();
    let cli = Cli::try_parse_from(args).and_then(Cli::checked);
    match cli.map_err(|error| error.to_string())?.command {
        Command::Replay(args) => args.fleet().map_err(|error| error.to_string()),
        other => Err(format!("{other:?}")),
    }
}

#[test]
fn a_value_of_a_tier_precedes_that_of_all() {
    let disk = ["--tier", "disk=1TB", "--tier", "host=7", "--tier", "store=9"];
    let speeds = ["--bytes-per-token", "1000", "--prefill", "50", "--bandwidth", "1.5GB/s"];
    let given = ["--bandwidth", "host=25GB/s", "--latency", "store=1.5ms", "--write", "never"];
    let write = ["--write", "disk=reuse:2"];
    let args = [&disk[..], &speeds, &given, &write].concat();
    let options = parse(&args).expect("tiers").expect("three");
    let tiers = options.tiers.iter().map(|option| {
        let TierOption { tier, size, rule, bytes_per_second, latency } = option;
        let write = rule.policy().to_string();
        (tier_name(*tier), *size, write, bytes_per_second.expect("given"), latency.as_micros())
    });
    let expected = [
        ("host", TierSize::Blocks(7), "publish", 25_000_000_000, 0),
        ("disk", TierSize::Bytes(1_000_000_000_000), "reuse:2", 1_500_000_000, 0),
        ("store", TierSize::Blocks(9), "never", 1_500_000_000, 1500),
    ];
    let expected = expected.map(|(a, b, c, d, e)| (a, b, c.to_owned(), d, e));
    assert_eq!(tiers.collect::<Vec<_>>(), expected);
    assert_eq!(parse(&[]), Ok(None));
}

#[test]
fn defaults_are_those_of_the_tiers() {
    let args = ["--tier", "store=1", "--tier", "host=1", "--tier", "disk=1"];
    let options = parse(&args).expect("tiers").expect("three");
    let expected = TIERS.map(WriteRule::of_tier);
    let rules: Vec<_> = options.tiers.iter().map(|option| option.rule).collect();
    assert_eq!(rules, expected);
}

#[test]
fn contradictions_are_refused() {
    let tier = ["--tier", "host=7"];
    let speeds = ["--prefill", "5", "--bytes-per-token", "8", "--bandwidth", "1GB/s"];
    for (args, words) in [
        (&["--tier", "gpu=7"][..], "unknown tier \"gpu\", expected one of host, disk, store"),
        (&["--tier", "host"], "TIER=BLOCKS"),
        (&["--tier", "host=0"], "at least 1"),
        (&["--tier", "host=7", "--tier", "host=8"], "--tier is given twice for host"),
        (&["--tier", "host=1GiB"], "--tier host in bytes needs --bytes-per-token"),
        (&["--write", "leave"], "--tier"),
        (&[tier, ["--write", "later"]].concat(), "unknown write policy \"later\""),
        (&[tier, ["--write", "disk=leave"]].concat(), "there is no --tier disk"),
        (&[tier, ["--write", "host=leave"]].concat(), "host memory gets every block"),
        (
            &[tier, ["--write", "leave"], ["--write", "never"]].concat(),
            "--write is given twice for all tiers",
        ),
        (&[tier, ["--bandwidth", "1GB/s"]].concat(), "--prefill"),
        (&[&tier[..], &speeds, &["--bandwidth", "1GB"]].concat(), "such as 1.3GB/s"),
        (&[&tier[..], &speeds, &["--bandwidth", "host=0B/s"]].concat(), "more than 0"),
        (&[&tier[..], &speeds, &["--latency", "5"]].concat(), "500us"),
        (&[&tier[..], &speeds, &["--latency", "host=-5ms"]].concat(), "500us"),
        (&[&tier[..], &speeds, &["--latency", "ms"]].concat(), "500us"),
        (&[&tier[..], &["--prefill", "5", "--bytes-per-token", "8"]].concat(), "--bandwidth"),
        (
            &[&tier[..], &speeds[..5], &["disk=1GB/s", "--tier", "disk=9"]].concat(),
            "--prefill needs --bandwidth host=..",
        ),
    ] {
        let error = parse(args).expect_err("a contradiction");
        assert!(error.contains(words), "{args:?}: {error}");
    }
}

#[test]
fn hints_are_of_the_oracle_or_noisy() {
    let hints = |value: &str| {
        let args = ["kv", "replay", "trace.jsonl", "--tier", "host=7", "--hints", value];
        let cli = Cli::try_parse_from(args).and_then(Cli::checked);
        match cli.map_err(|error| error.to_string())?.command {
            Command::Replay(args) => Ok(args.hints),
            other => Err(format!("{other:?}")),
        }
    };
    assert_eq!(hints("oracle"), Ok(Some(HintSource::Oracle)));
    assert_eq!(hints("noisy=0.2"), Ok(Some(HintSource::Noisy(0.2))));
    for (value, words) in [
        ("noisy=1.5", "noisy=1.5: a share from 0 to 1 is needed"),
        ("noisy=-0.5", "noisy=-0.5: a share from 0 to 1 is needed"),
        ("none", "unknown source of hints \"none\", expected one of oracle, noisy=SHARE"),
    ] {
        let error = hints(value).expect_err(value);
        assert!(error.contains(words), "{value}: {error}");
    }
}

#[test]
fn a_fleet_has_defaults() {
    let options = |args| fleet(args).expect("a fleet").expect("instances");
    let default = options(&["--instances", "3"]);
    assert_eq!((default.instances, default.copies, default.restart), (3, 1, None));
    assert_eq!(default.routes, Route::ALL);
    assert_eq!(default.event_lag, Duration::from_millis(100));
    assert_eq!(default.prefill_tokens_per_second, 22_000);
    let given = ["--instances", "2", "--route", "kv", "--route", "hash", "--copies", "9"];
    let times = ["--event-lag", "0", "--restart", "2.5", "--prefill", "7", "--policy", "lru"];
    let given = options(&[&given[..], &times].concat());
    assert_eq!((given.routes, given.copies), (vec![Route::Kv, Route::Hash], 9));
    assert_eq!(given.event_lag, Duration::ZERO);
    assert_eq!(given.restart, Some(Duration::from_millis(2500)));
    assert_eq!(given.prefill_tokens_per_second, 7);
    assert_eq!(fleet(&[]), Ok(None));
}

#[test]
fn a_fleet_has_no_options_of_one_cache() {
    for (option, value) in [
        ("--hints", "oracle"),
        ("--tier", "host=7"),
        ("--write", "publish"),
        ("--bandwidth", "1GB/s"),
        ("--latency", "1ms"),
        ("--bytes-per-token", "8"),
        ("--state-bytes", "8"),
        ("--snapshots", "8"),
        ("--state-grid", "8"),
    ] {
        let error = fleet(&["--instances", "2", option, value]).expect_err(option);
        let names =
            [format!("'{option} <"), "cannot be used with".to_owned(), "--instances".into()];
        assert!(names.iter().all(|name| error.contains(name)), "{option}: {error}");
    }
    for (option, value) in
        [("--route", "kv"), ("--copies", "2"), ("--event-lag", "1"), ("--restart", "1")]
    {
        let error = fleet(&[option, value]).expect_err(option);
        assert!(error.contains("not provided") && error.contains("--instances"), "{error}");
    }
    for (args, words) in [
        (&["--policy", "lru", "--policy", "lfu"][..], "--policy lfu: the caches of a fleet"),
        (&["--policy", "min"], "--policy min: the caches of a fleet"),
        (&["--route", "kv", "--route", "least", "--route", "kv"], "--route kv is given twice"),
        (&["--route", "random"], "one of round-robin, least, hash, kv"),
        (&["--copies", "0"], "at least 1"),
        (&["--event-lag", "-0.1"], "a number from 0 to 1000000000"),
        (&["--event-lag", "1e10"], "a number from 0 to 1000000000"),
        (&["--event-lag", "NaN"], "finite"),
        (&["--restart", "0"], "above 0"),
        (&["--prefill", "0"], "at least 1"),
        (&["--capacity-blocks", "0"], "at least 1"),
    ] {
        let error = fleet(&[&["--instances", "2"], args].concat()).expect_err("refused");
        assert!(error.contains(words), "{args:?}: {error}");
    }
    for (instances, words) in [("0", "at least 1"), ("100001", "a fleet has at most 100000")] {
        let error = fleet(&["--instances", instances]).expect_err("refused");
        assert!(error.contains(words), "{error}");
    }
    assert!(fleet(&["--instances", "100000"]).is_ok());
}

#[test]
fn prefill_is_for_tiers_or_a_fleet() {
    for (args, words) in [
        (&["--prefill", "5"][..], "--prefill needs --tier, unless"),
        (&["--prefill", "5", "--tier", "host=7"], "--prefill needs --bytes-per-token, unless"),
    ] {
        assert!(parse(args).expect_err("alone").contains(words), "{args:?}");
    }
}
