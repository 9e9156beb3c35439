package api

import (
	"fmt"
	"maps"
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/agent/sharing"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/tenant"
)

// Sharing is what a node that can be in offloads measures.
type Sharing struct {
	Prober *sharing.Prober
	Meter  *sharing.Meter
}

// ServeSharing makes status and metrics show what is measured for offloads.
func (s *Service) ServeSharing(is Sharing) { s.sharing.Store(&is) }

func (s *Service) addOffloads(r *pilasterv1.StatusResponse, core *agent.Core) {
	is := s.sharing.Load()
	var sent map[uint32]dpapi.Messages
	roles := core.Roles()
	if is != nil {
		r.Load = is.Meter.Last()
		r.Problems = append(r.Problems, is.Prober.Problems()...)
	}
	if is != nil && len(roles) > 0 {
		var err error
		if sent, err = is.Meter.Messages(); err != nil {
			r.Problems = append(r.Problems, fmt.Sprintf("offloads: %v", err))
		}
	}
	for _, role := range roles {
		out := roleToProto(role, sent[role.ID])
		if is != nil && role.Backend {
			answers := is.Prober.Answers(role.Tenant)
			for _, name := range slices.Sorted(maps.Keys(answers)) {
				out.Answers = append(out.Answers, &pilasterv1.FrontendAnswer{
					Frontend: name, AgoMs: uint32(answers[name].Milliseconds()),
				})
			}
		}
		r.Offloads = append(r.Offloads, out)
	}
}

func roleToProto(r agent.Role, sent dpapi.Messages) *pilasterv1.OffloadRole {
	out := &pilasterv1.OffloadRole{
		Tenant: r.Tenant, Id: r.ID, Node: r.Node, Backend: r.Backend, Draining: r.Draining, LostFrontends: r.Lost,
		Phase:   pilasterv1.OffloadPhase(slices.Index(tenant.OffloadPhases, r.Phase)),
		Packets: sent[dpapi.MessagePre] + sent[dpapi.MessagePass], Answered: sent[dpapi.MessageAnswer],
		Asked: sent[dpapi.MessageQuestion],
	}
	for _, f := range r.Active() {
		out.Frontends = append(out.Frontends, f.Node)
	}
	return out
}

// offloadMetrics are those of a node's parts in offloads.
type offloadMetrics struct{ messages, lost, answered, load *prometheus.Desc }

func newOffloadMetrics() offloadMetrics {
	return offloadMetrics{
		messages: metric(
			"offload_messages_total",
			"Messages of this node for an offload, by its backend, by kind: packets of a frontend to the backend, "+
				"questions of the backend, and answers to these.",
			"tenant", "backend", "kind",
		),
		lost: metric("offload_lost_frontends", "Frontends of this backend that do not answer its probes.", "tenant"),
		answered: metric(
			"offload_probe_age_seconds",
			"Since a frontend of this backend has last answered a probe; probes are sent every 0.1 s.",
			"tenant", "frontend",
		),
		load: metric(
			"packet_load",
			"Run time of programs by packets, as a part of the node's CPUs for packets: of its own containers, and as "+
				"a frontend. Measured only while the orchestrators want it.",
			"of",
		),
	}
}

func (m offloadMetrics) collect(ch chan<- prometheus.Metric, s *pilasterv1.StatusResponse) {
	send := func(d *prometheus.Desc, kind prometheus.ValueType, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, kind, v, labels...)
	}
	for _, r := range s.Offloads {
		count := func(kind string, n uint64) {
			send(m.messages, prometheus.CounterValue, float64(n), r.Tenant, r.Node, kind)
		}
		if !r.Backend {
			count("packet", r.Packets)
			count("answer", r.Answered)
			continue
		}
		count("question", r.Asked)
		send(m.lost, prometheus.GaugeValue, float64(len(r.LostFrontends)), r.Tenant)
		for _, a := range r.Answers {
			send(m.answered, prometheus.GaugeValue, float64(a.AgoMs)/1000, r.Tenant, a.Frontend)
		}
	}
	if s.Load == nil {
		return
	}
	fronting := 0.0
	for _, f := range s.Load.Fronting {
		fronting += f.Load
	}
	send(m.load, prometheus.GaugeValue, s.Load.Own, "own")
	send(m.load, prometheus.GaugeValue, fronting, "frontend")
}
