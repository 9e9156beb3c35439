package api

import (
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/service"
)

func addServices(r *pilasterv1.StatusResponse, core *agent.Core) {
	if s := core.Services(false); s.Services > 0 {
		r.Services = &pilasterv1.ServicesStatus{
			Services: uint32(s.Services), Endpoints: uint32(s.Endpoints), Own: uint32(s.Own),
		}
	}
}

// serviceMetrics are those of services.
type serviceMetrics struct{ services, endpoints, flows, refused *prometheus.Desc }

func newServiceMetrics() serviceMetrics {
	port := []string{"tenant", "service", "protocol", "port"}
	return serviceMetrics{
		services: metric("services", "Services of tenants with endpoints on this node."),
		endpoints: metric(
			"service_endpoints",
			"Endpoints of the services of tenants on this node, by where they are: here, or on other nodes.",
			"place",
		),
		flows: metric(
			"service_flows_total",
			"New connections and UDP flows of clients on this node, or from outside by it, that got an endpoint of a "+
				"service.",
			port...,
		),
		refused: metric(
			"service_refused_total",
			"Packets of clients on this node, or from outside by it, that were refused because a service had no "+
				"endpoint.",
			port...,
		),
	}
}

func (m serviceMetrics) collect(ch chan<- prometheus.Metric, core *agent.Core) {
	s := core.Services(true)
	send := func(d *prometheus.Desc, kind prometheus.ValueType, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, kind, v, labels...)
	}
	send(m.services, prometheus.GaugeValue, float64(s.Services))
	send(m.endpoints, prometheus.GaugeValue, float64(s.Own), "here")
	send(m.endpoints, prometheus.GaugeValue, float64(s.Endpoints-s.Own), "away")
	sums := map[[4]string]dpapi.ServiceCounts{} // by port: at the service's own address and at others
	for _, n := range s.Counts {
		labels := [4]string{
			n.Tenant, n.Service.String(), service.Protocol(n.Protocol).String(), strconv.Itoa(int(n.Address.Port())),
		}
		sum := sums[labels]
		sums[labels] = dpapi.ServiceCounts{Flows: sum.Flows + n.Flows, Refused: sum.Refused + n.Refused}
	}
	for labels, n := range sums {
		send(m.flows, prometheus.CounterValue, float64(n.Flows), labels[:]...)
		send(m.refused, prometheus.CounterValue, float64(n.Refused), labels[:]...)
	}
}
