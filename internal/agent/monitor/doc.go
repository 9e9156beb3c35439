// Package monitor distributes events of the packet path to watchers, and samples its drop counters and problems.
package monitor
