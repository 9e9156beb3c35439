package policytest

import (
	"fmt"
	"net/netip"

	"github.com/mattfenwick/cyclonus/pkg/connectivity/probe"
	"github.com/mattfenwick/cyclonus/pkg/generator"
	"github.com/mattfenwick/cyclonus/pkg/matcher"
	v1 "k8s.io/api/core/v1"
)

// A Trial holds the policies of a tenant, and the packets that its pods send each other.
type Trial struct {
	Name      string
	Documents []string
	Probes    []Probe
}

// A Probe is a TCP connection, or a datagram and its reply. Either both directions arrive or nothing does.
type Probe struct {
	From, To string // pods
	Protocol uint8
	Port     uint16
	Arrives  bool
}

// Pods returns the pods of all trials by name, with their identity labels. The pod with the last name is in the IP
// blocks of policies.
func Pods() map[string]map[string]string {
	w := newWorld(func(string) string { return "" })
	all := map[string]map[string]string{}
	for _, p := range w.Pods {
		all[podName(p.PodString().String())] = identity(p, w.Namespaces[p.Namespace])
	}
	return all
}

// podName turns "x/a" into "xa".
func podName(key string) string {
	p := probe.PodString(key)
	return p.Namespace() + p.PodName()
}

// Trials returns the steps of all cyclonus cases that change only policies, with all probes between two pods except
// those of SCTP. addresses are the pods' canonical addresses, which policies match.
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
