// Package traffic has the metrics of benchmarks, and the generator that sends and answers their traffic in a separate
// process.
package traffic
