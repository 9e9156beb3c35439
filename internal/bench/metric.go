package bench

import "golang.org/x/sys/unix"

// Metric is a kind of traffic and how its speed is told. The names are netperf's, and so is what they mean.
type Metric struct {
	Name   string
	Unit   string
	kind   int     // of socket
	block  int     // bytes of one write
	echo   bool    // every write waits for its echo
	factor float64 // from writes a second to Unit
}

// Metrics are what every scenario is measured by.
func Metrics() []Metric {
	return []Metric{
		{Name: "TCP_RR", Unit: "1/s", kind: unix.SOCK_STREAM, block: 1, echo: true, factor: 1},
		{Name: "UDP_RR", Unit: "1/s", kind: unix.SOCK_DGRAM, block: 1, echo: true, factor: 1},
		{Name: "TCP_STREAM", Unit: "Gbit/s", kind: unix.SOCK_STREAM, block: 128 << 10, factor: 8 * (128 << 10) / 1e9},
	}
}

func metricByName(name string) (Metric, bool) {
	for _, m := range Metrics() {
		if m.Name == name {
			return m, true
		}
	}
	return Metric{}, false
}
