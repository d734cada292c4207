//! Prometheus metric families.

use super::list::{ALL, MetricDefinition};
use prometheus::proto::{self, MetricFamily, MetricType};
use prometheus::{Encoder, TextEncoder};
use std::collections::HashMap;
use udm_core::Nanos;

/// Names and values of the labels of a series.
pub(super) type MetricLabels<'a> = &'a [(&'static str, &'a str)];

/// Number of histogram buckets; each bound is twice the one before. Finer buckets would be too many
/// lines for 10,000 devices.
const BUCKETS: usize = 24;
/// The smallest bound in ns.
const SHORTEST: u64 = 2048;

/// The metric families of one reading.
#[derive(Default)]
pub(super) struct MetricFamilies(HashMap<&'static str, Vec<proto::Metric>>);

impl MetricFamilies {
    fn series(&mut self, metric: &MetricDefinition, labels: MetricLabels<'_>) -> &mut proto::Metric {
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
    pub fn add(&mut self, metric: &MetricDefinition, labels: MetricLabels<'_>, value: f64) {
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

    /// Adds a histogram. Each step counts requests that took less than its time and at least the
    /// time of the step before; `sum` is the total time.
    pub fn add_times(
        &mut self,
        metric: &MetricDefinition,
        labels: MetricLabels<'_>,
        steps: &[(Nanos, u64)],
        sum: Nanos,
    ) {
        let bounds = (0..BUCKETS).map(|n| SHORTEST << n);
        let bucket = |bound: u64| {
            let mut bucket = proto::Bucket::default();
            bucket.set_upper_bound(nanos_to_seconds(Nanos(bound)));
            let below = steps.iter().filter(|(end, _)| end.0 <= bound);
            bucket.set_cumulative_count(below.map(|(_, count)| count).sum());
            bucket
        };
        let mut histogram = proto::Histogram::default();
        histogram.set_bucket(bounds.map(bucket).collect());
        histogram.set_sample_count(steps.iter().map(|(_, count)| count).sum());
        histogram.set_sample_sum(nanos_to_seconds(sum));
        self.series(metric, labels).set_histogram(histogram);
    }

    /// The output, in Prometheus' text format 0.0.4.
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

/// A time in seconds, Prometheus' unit.
pub(super) fn nanos_to_seconds(time: Nanos) -> f64 {
    time.0 as f64 / 1e9
}
