package traffic

import (
	"slices"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/bench/report"
)

// Metric is a kind of traffic and what is measured of it. Names that netperf uses have netperf's meaning.
type Metric struct {
	Name  string
	About string
	Unit  string
	// Less means that smaller values are better.
	Less bool
	// Figure is the papers' figure.
	Figure string

	Traffic traffic
	kind    int    // socket type
	block   int    // bytes per write
	flows   int    // concurrent connections
	Cut     bool   // segmentation offloads are disabled
	Trials  bool   // single trials, in turn with the other scenarios; all such metrics share the same traffic
	Counted string // unit that CPU time refers to
	Value   func(Answer) float64
	// Programs is the direction of the measured programs; the kernel's BPF statistics are enabled.
	Programs Direction
	// Lacks returns the reason why this machine cannot measure the metric. The field is nil if every machine can.
	Lacks func() error
}

// ID returns the name.
func (m Metric) ID() string { return m.Name }

const (
	figure20 = "NETPILA fig. 20 (latency of RDMA), §7.2: the same as native IPv6; ONCache's request-response: +36–41 " +
		"% (TCP), +34–39 % (UDP) over VXLAN"
	figure21 = "NETPILA fig. 21 (bandwidth of RDMA), §7.2: the same as native IPv6"
	section6 = "NETPILA §6.2: first packet 0.812 ms, later ones 0.082 ms"
)

func perSecond(a Answer) float64 { return a.Ops / a.Seconds }

// All returns all metrics, in the order of reports: those of packet paths, and those of applications.
func All() []Metric { return append(Metrics(), Memcached()) }

// Metrics returns the metrics of packet paths, in the order of reports.
func Metrics() []Metric {
	gigabits := func(a Answer) float64 { return perSecond(a) * 8 * StreamBlock / 1e9 }
	stream := Metric{
		Unit:    "Gbit/s",
		Figure:  figure21,
		Traffic: streaming,
		kind:    unix.SOCK_STREAM,
		block:   StreamBlock,
		Counted: "128 KiB",
		Value:   gigabits,
	}
	echo := Metric{
		Unit:    "1/s",
		Figure:  figure20,
		Traffic: echoing,
		block:   1,
		flows:   1,
		Counted: "transaction",
		Value:   perSecond,
	}
	program := Metric{
		Unit:    "ns",
		Less:    true,
		Figure:  "ONCache's table of the CPU time of each part of the path",
		Traffic: echoing,
		kind:    unix.SOCK_DGRAM,
		block:   1,
		flows:   1,
	}
	return []Metric{
		echo.as("TCP_RR", "1 byte and its echo on one connection", func(m *Metric) { m.kind = unix.SOCK_STREAM }),
		echo.as("UDP_RR", "1 byte and its echo", func(m *Metric) { m.kind = unix.SOCK_DGRAM }),
		echo.as("TCP_CRR", "connect, 1 byte, its echo, close", func(m *Metric) {
			m.kind, m.Traffic, m.Figure = unix.SOCK_STREAM, connecting, "ONCache's connect-request-response: 3.13 "+
				"times Slim"
		}),
		echo.as("UDP_PPS", "datagrams of 18 bytes, as many as arrive", func(m *Metric) {
			m.kind, m.Traffic, m.block, m.Counted, m.Figure = unix.SOCK_DGRAM, flooding, 18, "packet",
				"NETPILA §7.2: no more work a packet than native IPv6"
		}),
		stream.as("TCP_STREAM", "one connection, writes of 128 KiB", func(m *Metric) { m.flows = 1 }),
		stream.as("TCP_STREAM4", "four connections, writes of 128 KiB", func(m *Metric) { m.flows = 4 }),
		stream.as(
			"TCP_STREAM_CUT",
			"one connection, segmentation offload off",
			func(m *Metric) { m.flows, m.Cut = 1, true },
		),
		stream.as(
			"TCP_STREAM4_CUT",
			"four connections, segmentation offload off",
			func(m *Metric) { m.flows, m.Cut = 4, true },
		),
		{
			Name:    "FIRST_RTT",
			About:   "a new socket's first datagram and its echo, nothing cached",
			Unit:    "µs",
			Less:    true,
			Figure:  section6,
			Traffic: firsts,
			Trials:  true,
			kind:    unix.SOCK_DGRAM,
			block:   1,
			flows:   1,
			Value:   func(a Answer) float64 { return report.Median(a.First) * 1e6 },
		},
		{Name: "NEXT_RTT", About: "the datagrams that follow the first", Unit: "µs", Less: true, Figure: section6,
			Traffic: firsts, Trials: true, kind: unix.SOCK_DGRAM, block: 1, flows: 1,
			Value: func(a Answer) float64 { return report.Median(a.Next) * 1e6 }},
		program.as(
			"PROGRAM_OUT",
			"our programs' time for a packet on its way out, under UDP_RR",
			func(m *Metric) { m.Programs = Out },
		),
		program.as(
			"PROGRAM_IN",
			"our programs' time for a packet on its way in, under UDP_RR",
			func(m *Metric) { m.Programs = In },
		),
	}
}

const StreamBlock = 128 << 10

// as returns a copy of a metric with a few differences.
func (m Metric) as(name, about string, differs func(*Metric)) Metric {
	m.Name, m.About = name, about
	differs(&m)
	return m
}

func MetricByName(name string) (Metric, bool) {
	all := All()
	i := slices.IndexFunc(all, func(m Metric) bool { return m.Name == name })
	if i < 0 {
		return Metric{}, false
	}
	return all[i], true
}

// Direction is a packet's direction, as seen by a node.
type Direction int

const (
	Out Direction = 1 + iota
	In
)
