package evpnroutes

import (
	"github.com/prometheus/client_golang/prometheus"

	"pilaster.io/pilaster/internal/evpn"
)

// collector has the metrics of the exchange with peers, read on demand.
type collector struct{ status func() Status }

// NewCollector returns metrics of a status.
func NewCollector(status func() Status) prometheus.Collector { return collector{status} }

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("pilaster_orchestrator_evpn_"+name, help, labels, nil)
}

var (
	descUp        = desc("peer_up", "1 while the session with a BGP peer is established.", "peer")
	descRoutes    = desc("peer_routes", "Accepted routes of a BGP peer, by type.", "peer", "type")
	descRefused   = desc("peer_routes_refused", "Refused routes of a BGP peer, by reason.", "peer", "reason")
	descStale     = desc("peer_routes_stale", "Accepted routes of a lost BGP peer.", "peer")
	descFlaps     = desc("peer_sessions_ended_total", "Sessions with a BGP peer that ended.", "peer")
	descExcess    = desc("peer_limits_exceeded_total", "Sessions ended because of a limit.", "peer")
	descAnnounced = desc("routes_announced", "Routes that this orchestrator announces, by type.", "type")
	descRecords   = desc("records", "Records that follow from imported routes, by kind.", "kind")
	descContested = desc("contested", "MACs and addresses of containers that other speakers announce too.")
	descSkipped   = desc("skipped", "Tenants and nodes that are not announced.")
)

func (c collector) Describe(to chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		descUp, descRoutes, descRefused, descStale, descFlaps, descExcess, descAnnounced, descRecords, descContested,
		descSkipped,
	} {
		to <- d
	}
}

func (c collector) Collect(to chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, value int, labels ...string) {
		to <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(value), labels...)
	}
	counter := func(d *prometheus.Desc, value uint64, labels ...string) {
		to <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(value), labels...)
	}
	kinds := []evpn.Kind{evpn.KindMACIP, evpn.KindMulticast, evpn.KindPrefix}
	s := c.status()
	for _, p := range s.Peers {
		peer, up := p.Addr.String(), 0
		if p.Up {
			up = 1
		}
		gauge(descUp, up, peer)
		for _, k := range kinds {
			gauge(descRoutes, p.Accepted[k], peer, k.String())
		}
		for _, r := range evpn.Reasons() {
			gauge(descRefused, p.Refused[r], peer, r.String())
		}
		gauge(descStale, p.Stale, peer)
		counter(descFlaps, p.Flaps, peer)
		counter(descExcess, p.Excesses, peer)
	}
	for _, k := range kinds {
		gauge(descAnnounced, s.Announced[k], k.String())
	}
	for k := evpn.RecordHost; k <= evpn.RecordMember; k++ {
		gauge(descRecords, s.Records[k], k.String())
	}
	gauge(descContested, len(s.Contested))
	gauge(descSkipped, len(s.Skipped))
}
