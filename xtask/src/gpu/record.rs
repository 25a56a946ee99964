//! Records that the programs of a kit print, one JSON object per line.
use serde_json::Value;

/// One measured time.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Measure {
    pub(super) name: String,
    /// Median time of one call.
    pub(super) micros: f64,
    pub(super) bytes: Option<f64>,
    pub(super) gb_per_s: Option<f64>,
    pub(super) tflop_per_s: Option<f64>,
    /// Fraction of the rate of the driver's own copy.
    pub(super) of_copy: Option<f64>,
    /// Times of other libraries in microseconds, by name.
    pub(super) peers: Vec<(String, f64)>,
}

/// All records of a run.
#[derive(Debug, Default)]
pub(super) struct Records {
    /// Facts by name.
    pub(super) facts: Vec<(String, Value)>,
    pub(super) measures: Vec<Measure>,
    /// Checks by name, with an error message or without.
    pub(super) checks: Vec<(String, Option<String>)>,
    /// Skipped measurements by name, with the reason.
    pub(super) skipped: Vec<(String, String)>,
    /// Times of peers for measurements without a record yet: name, peer, microseconds.
    waiting: Vec<(String, String, f64)>,
}

impl Records {
    /// Reads lines; lines that are not records are other output, or were cut off by a crash.
    pub(super) fn read(&mut self, text: &str) {
        for line in text.lines() {
            if let Ok(record) = serde_json::from_str::<Value>(line) {
                self.add(&record);
            }
        }
    }

    /// Returns the value of a fact.
    pub(super) fn fact(&self, name: &str) -> Option<&Value> {
        self.facts.iter().find(|(found, _)| found == name).map(|(_, value)| value)
    }

    fn add(&mut self, record: &Value) -> Option<()> {
        let text = |key: &str| record.get(key).and_then(Value::as_str).map(str::to_owned);
        let number = |key: &str| record.get(key).and_then(Value::as_f64);
        let (kind, name) = (text("kind")?, text("name")?);
        match kind.as_str() {
            "fact" => self.facts.push((name, record.get("value")?.clone())),
            "skipped" => self.skipped.push((name, text("detail")?)),
            "check" => {
                let is_right = record.get("passed")?.as_bool()?;
                let detail = text("detail").unwrap_or_default();
                self.checks.push((name, (!is_right).then_some(detail)));
            }
            "measure" => {
                let micros = number("us")?;
                let is_ours = |(measure, ..): &mut (String, String, f64)| *measure == name;
                let peers = self.waiting.extract_if(.., is_ours);
                let peers = peers.map(|(_, peer, micros)| (peer, micros)).collect();
                self.measures.push(Measure {
                    name,
                    micros,
                    bytes: number("bytes"),
                    gb_per_s: number("gb_per_s"),
                    tflop_per_s: number("tflop_per_s"),
                    of_copy: number("of_copy"),
                    peers,
                });
            }
            "peer" => {
                let (peer, micros) = (text("peer")?, number("us")?);
                match self.measures.iter_mut().find(|measure| measure.name == name) {
                    Some(ours) => ours.peers.push((peer, micros)),
                    None => self.waiting.push((name, peer, micros)),
                }
            }
            _ => {}
        }
        Some(())
    }
}
