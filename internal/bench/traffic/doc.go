// Package traffic has the metrics of benchmarks. Its generator is a separate process that sends or answers the traffic
// of a metric.
package traffic
