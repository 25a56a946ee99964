//! The report: checks, their outcomes, and measurements.
use std::fmt::Write as _;

use serde_json::{Value, json};

use super::predict::{Prediction, Unit, prediction};
use super::record::{Measure, Records};
use super::target::{self, targets};

/// The outcome of a check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Outcome {
    /// Passed, with output that is worth showing.
    Passed(String),
    Failed(String),
    /// Killed at its time limit.
    TimedOut(String),
    Skipped(String),
}

impl Outcome {
    /// Returns its name and its message.
    pub(super) fn words(&self) -> (&'static str, &str) {
        match self {
            Self::Passed(message) => ("passed", message),
            Self::Failed(message) => ("failed", message),
            Self::TimedOut(message) => ("timed out", message),
            Self::Skipped(message) => ("not run", message),
        }
    }

    /// Returns whether it is a failure.
    pub(super) fn is_failure(&self) -> bool {
        matches!(self, Self::Failed(_) | Self::TimedOut(_))
    }
}

/// One program that was run, or should have been.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Check {
    pub(super) name: String,
    /// The command as one would type it in the kit.
    pub(super) command: String,
    /// `None` if nothing ended, or a signal ended it.
    pub(super) exit_code: Option<i32>,
    pub(super) seconds: f64,
    pub(super) outcome: Outcome,
}

/// The results of one run.
#[derive(Debug, Default)]
pub(super) struct Report {
    pub(super) card: String,
    pub(super) driver: String,
    pub(super) commit: String,
    /// `YYYY-MM-DD`.
    pub(super) date: String,
    pub(super) checks: Vec<Check>,
    pub(super) records: Records,
}

impl Report {
    /// Returns the name of its files: the card's name, in portable characters.
    pub(super) fn file_name(&self) -> String {
        let plain = |letter: char| {
            if letter.is_ascii_alphanumeric() { letter.to_ascii_lowercase() } else { '-' }
        };
        let name: String = self.card.chars().map(plain).collect();
        let words: Vec<_> = name.split('-').filter(|word| !word.is_empty()).collect();
        if words.is_empty() { "unnamed".to_owned() } else { words.join("-") }
    }

    /// Returns the checks that failed or did not end.
    pub(super) fn failed(&self) -> Vec<&Check> {
        self.checks.iter().filter(|check| check.outcome.is_failure()).collect()
    }

    /// Formats the measurements so far, for a terminal.
    pub(super) fn headlines(&self) -> String {
        let line = |measure: &Measure| {
            let share = measure.of_copy.map(|share| format!(", {share:.3} of copy"));
            let rate = measure.tflop_per_s.map(|rate| format!(", {rate:.1} TFLOP/s"));
            let rest = [share, rate].into_iter().flatten().collect::<String>();
            format!("   {}: {:.2} us{rest}\n", measure.name, measure.micros)
        };
        self.records.measures.iter().map(line).collect()
    }

    pub(super) fn json(&self) -> Value {
        let checks: Vec<_> = self.checks.iter().map(check_json).collect();
        let measures: Vec<_> =
            self.records.measures.iter().map(|measure| measure_json(&self.card, measure)).collect();
        let skipped = self.records.skipped.iter();
        let skipped: Vec<_> =
            skipped.map(|(name, why)| json!({"name": name, "why": why})).collect();
        let facts: serde_json::Map<_, _> = self.records.facts.iter().cloned().collect();
        json!({
            "card": self.card,
            "driver": self.driver,
            "commit": self.commit,
            "date": self.date,
            "targets_are_for": target::CARD,
            "facts": facts,
            "checks": checks,
            "measures": measures,
            "skipped": skipped,
        })
    }

    pub(super) fn markdown(&self) -> String {
        let mut text = String::new();
        let Self { card, driver, commit, date, .. } = self;
        let _ = writeln!(text, "# {card}\n");
        let _ = writeln!(text, "Commit `{commit}`, driver {driver}, {date}.");
        text.push_str("Written by `cargo xtask gpu`; how to read it: [README](README.md).\n\n");
        if !card.contains(target::CARD) {
            let _ = writeln!(
                text,
                "Targets are set for an {}; on this card they are for comparison.\n",
                target::CARD
            );
        }
        self.show_facts(&mut text);
        self.show_checks(&mut text);
        self.show_measures(&mut text);
        if !self.records.skipped.is_empty() {
            text.push_str("## Not measured\n\n| what | why |\n|---|---|\n");
            for (name, why) in &self.records.skipped {
                let _ = writeln!(text, "| {} | {} |", cell(name), cell(why));
            }
        }
        format!("{}\n", text.trim_end())
    }

    fn show_facts(&self, text: &mut String) {
        let facts = self.records.facts.iter().filter(|(name, _)| name != "card");
        for (name, value) in facts {
            let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            let _ = writeln!(text, "- {}: {}", cell(name), cell(&value));
        }
        text.push('\n');
    }

    fn show_checks(&self, text: &mut String) {
        text.push_str("## Checks\n\n| check | command | exit | seconds | result |\n");
        text.push_str("|---|---|---|---|---|\n");
        for check in &self.checks {
            let (word, message) = check.outcome.words();
            let word = if check.outcome.is_failure() {
                format!("**{}**", word.to_uppercase())
            } else {
                word.to_owned()
            };
            let result = if message.is_empty() { word } else { format!("{word}: {message}") };
            let exit = check.exit_code.map_or_else(|| "-".to_owned(), |code| code.to_string());
            let _ = writeln!(
                text,
                "| {} | `{}` | {exit} | {:.1} | {} |",
                cell(&check.name),
                cell(&check.command),
                check.seconds,
                cell(&result)
            );
        }
        text.push('\n');
    }

    fn show_measures(&self, text: &mut String) {
        let measures = &self.records.measures;
        let mut peers: Vec<&str> = Vec::new();
        for (peer, _) in measures.iter().flat_map(|measure| &measure.peers) {
            if !peers.contains(&peer.as_str()) {
                peers.push(peer);
            }
        }
        let mut last = "";
        for measure in measures {
            let family = measure.name.split('/').next().unwrap_or_default();
            if family != last {
                last = family;
                let _ = write!(text, "\n## {family}\n\n| what | bytes | us | rate | of copy |");
                for peer in &peers {
                    let _ = write!(text, " {} us |", cell(peer));
                }
                text.push_str(" expected | target |\n|---|---|---|---|---|");
                text.push_str(&"---|".repeat(peers.len()));
                text.push_str("---|---|\n");
            }
            text.push_str(&row(&self.card, measure, &peers));
        }
        text.push('\n');
    }
}

fn row(card: &str, measure: &Measure, peers: &[&str]) -> String {
    let rate = match (measure.gb_per_s, measure.tflop_per_s) {
        (_, Some(rate)) => format!("{rate:.1} TFLOP/s"),
        (Some(rate), None) => format!("{rate:.1} GB/s"),
        (None, None) => "-".to_owned(),
    };
    let or_dash = |value: Option<String>| value.unwrap_or_else(|| "-".to_owned());
    let bytes = or_dash(measure.bytes.map(|bytes| format!("{bytes:.0}")));
    let of_copy = or_dash(measure.of_copy.map(|share| format!("{share:.3}")));
    let mut text = format!(
        "| {} | {bytes} | {:.2} | {rate} | {of_copy} |",
        cell(&measure.name),
        measure.micros
    );
    for peer in peers {
        let micros = measure.peers.iter().find(|(name, _)| name == peer);
        let micros = or_dash(micros.map(|(_, micros)| format!("{micros:.2}")));
        let _ = write!(text, " {micros} |");
    }
    let targets: Vec<_> = targets(measure)
        .into_iter()
        .map(|target| {
            let word = if target.is_met { "met" } else { "**missed**" };
            format!("{}: {word}", target.text)
        })
        .collect();
    let expected = or_dash(prediction(card, measure).map(expected));
    let _ = writeln!(text, " {expected} | {} |", cell(&targets.join("; ")));
    text
}

/// Formats a prediction, with the ratio if it was missed.
fn expected(prediction: Prediction) -> String {
    let value = match prediction.unit {
        Unit::OfCopy => format!("{:.2}", prediction.value),
        Unit::TflopPerS => format!("{:.0} TFLOP/s", prediction.value),
    };
    match prediction.ratio {
        Some(ratio) if prediction.is_missed() => format!("{value}: **{ratio:.2} of it**"),
        _ => value,
    }
}

/// Escapes text for a table cell.
fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace(['\n', '\r'], " ")
}

fn check_json(check: &Check) -> Value {
    let (outcome, message) = check.outcome.words();
    json!({
        "name": check.name,
        "command": check.command,
        "exit_code": check.exit_code,
        "seconds": check.seconds,
        "outcome": outcome,
        "detail": message,
    })
}

fn measure_json(card: &str, measure: &Measure) -> Value {
    let expected = prediction(card, measure).map(|prediction| {
        json!({
            "value": prediction.value,
            "unit": match prediction.unit {
                Unit::OfCopy => "of_copy",
                Unit::TflopPerS => "tflop_per_s",
            },
            "ratio": prediction.ratio,
            "is_missed": prediction.is_missed(),
        })
    });
    let targets = targets(measure).into_iter();
    let targets: Vec<_> =
        targets.map(|target| json!({"text": target.text, "is_met": target.is_met})).collect();
    let peers = measure.peers.iter();
    let peers: serde_json::Map<_, _> =
        peers.map(|(peer, micros)| (peer.clone(), json!(micros))).collect();
    json!({
        "name": measure.name,
        "us": measure.micros,
        "bytes": measure.bytes,
        "gb_per_s": measure.gb_per_s,
        "tflop_per_s": measure.tflop_per_s,
        "of_copy": measure.of_copy,
        "peers_us": peers,
        "expected": expected,
        "targets": targets,
    })
}
