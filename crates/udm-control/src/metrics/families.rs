//! Numbers with their labels, as Prometheus takes them.

use super::list::{ALL, Metric};
use prometheus::proto::{self, MetricFamily, MetricType};
use prometheus::{Encoder, TextEncoder};
use std::collections::HashMap;
use udm_core::Nanos;

/// What belongs to a series: names and values.
pub(super) type Labels<'a> = &'a [(&'static str, &'a str)];

/// Bounds of a histogram's buckets: each is twice the one before. Finer steps, for 10,000 devices,
/// would be more lines than anybody wants to store.
const BUCKETS: usize = 24;
/// The shortest, in ns.
const SHORTEST: u64 = 2048;

/// All numbers of one look.
#[derive(Default)]
pub(super) struct MetricFamilies(HashMap<&'static str, Vec<proto::Metric>>);

impl MetricFamilies {
    fn series(&mut self, metric: &Metric, labels: Labels<'_>) -> &mut proto::Metric {
        let pair = |(name, value): &(&str, &str)| {
            let mut pair = proto::LabelPair::default();
            pair.set_name((*name).into());
            pair.set_value((*value).into());
            pair
        };
        let all = self.0.entry(metric.name).or_default();
        all.push(proto::Metric::from_label(labels.iter().map(pair).collect()));
        all.last_mut().expect("pushed")
    }

    /// Adds a counter or a gauge.
    pub fn add(&mut self, metric: &Metric, labels: Labels<'_>, value: f64) {
        let series = self.series(metric, labels);
        if metric.kind == MetricType::COUNTER {
            let mut counter = proto::Counter::default();
            counter.set_value(value);
            series.set_counter(counter);
        } else {
            let mut gauge = proto::Gauge::default();
            gauge.set_value(value);
            series.set_gauge(gauge);
        }
    }

    /// Adds a histogram of requests that took less than so long and no less than the step before,
    /// `sum` in all.
    pub fn add_times(&mut self, metric: &Metric, labels: Labels<'_>, steps: &[(Nanos, u64)], sum: Nanos) {
        let bounds = (0..BUCKETS).map(|n| SHORTEST << n);
        let bucket = |bound: u64| {
            let mut bucket = proto::Bucket::default();
            bucket.set_upper_bound(seconds(Nanos(bound)));
            let below = steps.iter().filter(|(end, _)| end.0 <= bound);
            bucket.set_cumulative_count(below.map(|(_, count)| count).sum());
            bucket
        };
        let mut histogram = proto::Histogram::default();
        histogram.set_bucket(bounds.map(bucket).collect());
        histogram.set_sample_count(steps.iter().map(|(_, count)| count).sum());
        histogram.set_sample_sum(seconds(sum));
        self.series(metric, labels).set_histogram(histogram);
    }

    /// The text that Prometheus reads, format 0.0.4.
    pub fn text(mut self) -> Vec<u8> {
        let families: Vec<MetricFamily> = ALL
            .iter()
            .filter_map(|metric| {
                let mut family = MetricFamily::default();
                family.set_name(metric.name.into());
                family.set_help(metric.help.into());
                family.set_field_type(metric.kind);
                family.set_metric(self.0.remove(metric.name)?);
                Some(family)
            })
            .collect();
        let mut text = Vec::new();
        TextEncoder::new().encode(&families, &mut text).expect("no family is empty, and memory takes all");
        text
    }
}

/// A time as Prometheus wants it.
pub(super) fn seconds(time: Nanos) -> f64 {
    time.0 as f64 / 1e9
}
