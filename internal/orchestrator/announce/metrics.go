package announce

import "github.com/prometheus/client_golang/prometheus"

// collector has the metrics of the announcements, read on demand.
type collector struct{ status func() Status }

// NewCollector returns metrics of a status.
func NewCollector(status func() Status) prometheus.Collector { return collector{status} }

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("pilaster_orchestrator_bgp_"+name, help, labels, nil)
}

var (
	descUp          = desc("peer_up", "1 while the session with a BGP peer is established.", "peer")
	descFlaps       = desc("peer_sessions_ended_total", "Sessions with a BGP peer that ended.", "peer")
	descAnnounced   = desc("addresses_announced", "External and load-balancer addresses that are announced.")
	descUnannounced = desc("addresses_unannounced", "Those that are not announced, because they have no next hop.")
	descNextHops    = desc("next_hops", "Routes that are announced: one for each address and node.")
	descSilent      = desc("nodes_silent", "Nodes that do not answer probes, so no address is announced by them.")
)

func (c collector) Describe(to chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		descUp, descFlaps, descAnnounced, descUnannounced, descNextHops, descSilent,
	} {
		to <- d
	}
}

func (c collector) Collect(to chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, value int, labels ...string) {
		to <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(value), labels...)
	}
	s := c.status()
	for _, p := range s.Peers {
		up := 0
		if p.Up {
			up = 1
		}
		gauge(descUp, up, p.Addr.String())
		to <- prometheus.MustNewConstMetric(descFlaps, prometheus.CounterValue, float64(p.Flaps), p.Addr.String())
	}
	announced, hops, silent := 0, 0, map[Node]bool{}
	for _, a := range s.Addresses {
		hops += len(a.Nodes)
		if len(a.Nodes) > 0 {
			announced++
		}
		for _, n := range a.Silent {
			silent[n] = true
		}
	}
	gauge(descAnnounced, announced)
	gauge(descUnannounced, len(s.Addresses)-announced)
	gauge(descNextHops, hops)
	gauge(descSilent, len(silent))
}
