package policytest

import (
	"fmt"
	"net/netip"

	"github.com/mattfenwick/cyclonus/pkg/connectivity/probe"
	"github.com/mattfenwick/cyclonus/pkg/generator"
	"github.com/mattfenwick/cyclonus/pkg/matcher"
	v1 "k8s.io/api/core/v1"
)

// A Trial is policies of a tenant, and packets that its pods send each other.
type Trial struct {
	Name      string
	Documents []string
	Probes    []Probe
}

// A Probe is a connection of TCP or a datagram with its answer. Both are to arrive, or nothing.
type Probe struct {
	From, To string // pods
	Protocol uint8
	Port     uint16
	Arrives  bool
}

// Pods are those that all trials are about, by name, with the labels of their identities. The last in order of names is
// in blocks of policies.
func Pods() map[string]map[string]string {
	w := newWorld(func(string) string { return "" })
	all := map[string]map[string]string{}
	for _, p := range w.Pods {
		all[podName(p.PodString().String())] = identity(p, w.Namespaces[p.Namespace])
	}
	return all
}

// podName of "x/a" is "xa".
func podName(key string) string {
	p := probe.PodString(key)
	return p.Namespace() + p.PodName()
}

// Trials are the steps of all cases that cyclonus generates which change policies alone, with all of its probes between
// two pods but those of SCTP. Pods have the canonical addresses by which policies know them.
func Trials(addresses map[string]netip.Addr) (trials []Trial, err error) {
	begin := func() *world {
		return newWorld(func(pod string) string { return addresses[podName(pod)].String() })
	}
	err = steps(addresses["zc"].String(), begin, func(name string, w *world, config *generator.ProbeConfig) error {
		if w.altered {
			return nil
		}
		trial := Trial{Name: name}
		for _, p := range w.policies {
			text, err := document(p)
			if err != nil {
				return err
			}
			trial.Documents = append(trial.Documents, string(text))
		}
		judge := matcher.BuildNetworkPolicies(false, w.policies)
		for _, job := range (&probe.JobBuilder{}).GetJobsForProbeConfig(w.Resources, config).Valid {
			if job.Protocol == v1.ProtocolSCTP || job.FromKey == job.ToKey {
				continue
			}
			t := job.Traffic()
			trial.Probes = append(trial.Probes, Probe{
				From: podName(
					job.FromKey,
				), To: podName(job.ToKey), Protocol: protocols[string(t.Protocol)], Port: uint16(t.ResolvedPort),
				Arrives: judge.IsIngressOrEgressAllowed(t, false).IsAllowed() &&
					judge.IsIngressOrEgressAllowed(t, true).IsAllowed(),
			})
		}
		if len(trial.Probes) == 0 {
			return fmt.Errorf("no packets")
		}
		trials = append(trials, trial)
		return nil
	})
	return trials, err
}
