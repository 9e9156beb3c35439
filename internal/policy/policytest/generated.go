package policytest

import (
	"fmt"

	"github.com/mattfenwick/cyclonus/pkg/connectivity/probe"
	"github.com/mattfenwick/cyclonus/pkg/generator"
	v1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"

	"pilaster.io/pilaster/internal/address"
)

// Generated are all steps of all cases that cyclonus generates, with all its probes. Pods have addresses with the
// prefix, to which a number is added: "192.168.1." or "fd00:1::".
func Generated(prefix string) (cases []Case, err error) {
	all := generator.NewTestCaseGenerator(true, prefix+"9", []string{"x", "y", "z"}, nil, nil)
	for _, tc := range all.GenerateAllTestCases() {
		w := newWorld(prefix)
		for i, step := range tc.Steps {
			name := fmt.Sprintf("%s, step %d", tc.Description, i+1)
			for _, action := range step.Actions {
				if err := w.apply(action); err != nil {
					return nil, fmt.Errorf("%s: %w", name, err)
				}
			}
			c, err := w.probe(name, step.Probe)
			if err != nil {
				return nil, err
			}
			cases = append(cases, c)
		}
	}
	return cases, nil
}

// world is what cyclonus would have in its cluster.
type world struct {
	*probe.Resources
	policies []*networkingv1.NetworkPolicy
	prefix   string
	given    int // addresses
}

// newWorld has the pods that cyclonus begins with: a, b and c in x, y and z, each with the ports 80 and 81.
func newWorld(prefix string) *world {
	w := &world{Resources: &probe.Resources{Namespaces: map[string]map[string]string{}}, prefix: prefix}
	for _, ns := range []string{"x", "y", "z"} {
		w.Namespaces[ns] = withName(ns, map[string]string{"ns": ns})
		for _, name := range []string{"a", "b", "c"} {
			pod := probe.NewDefaultPod(ns, name, []int{80, 81}, []v1.Protocol{v1.ProtocolTCP, v1.ProtocolUDP, v1.ProtocolSCTP}, false, "")
			pod.IP = w.address()
			w.Pods = append(w.Pods, pod)
		}
	}
	return w
}

func (w *world) address() string {
	w.given++
	return fmt.Sprint(w.prefix, w.given)
}

func (w *world) apply(a *generator.Action) (err error) {
	r := w.Resources
	switch {
	case a.CreatePolicy != nil:
		w.policies = append(w.policies, a.CreatePolicy.Policy)
	case a.UpdatePolicy != nil:
		p := a.UpdatePolicy.Policy
		w.remove(p.Namespace, p.Name)
		w.policies = append(w.policies, p)
	case a.DeletePolicy != nil:
		w.remove(a.DeletePolicy.Namespace, a.DeletePolicy.Name)
	case a.CreateNamespace != nil:
		r, err = r.CreateNamespace(a.CreateNamespace.Namespace, withName(a.CreateNamespace.Namespace, a.CreateNamespace.Labels))
	case a.SetNamespaceLabels != nil:
		r, err = r.UpdateNamespaceLabels(a.SetNamespaceLabels.Namespace, withName(a.SetNamespaceLabels.Namespace, a.SetNamespaceLabels.Labels))
	case a.DeleteNamespace != nil:
		r, err = r.DeleteNamespace(a.DeleteNamespace.Namespace)
	case a.CreatePod != nil:
		if r, err = r.CreatePod(a.CreatePod.Namespace, a.CreatePod.Pod, a.CreatePod.Labels); err == nil {
			r.Pods[len(r.Pods)-1].IP = w.address()
		}
	case a.SetPodLabels != nil:
		r, err = r.SetPodLabels(a.SetPodLabels.Namespace, a.SetPodLabels.Pod, a.SetPodLabels.Labels)
	case a.DeletePod != nil:
		r, err = r.DeletePod(a.DeletePod.Namespace, a.DeletePod.Pod)
	case a.ReadNetworkPolicies != nil: // reads what is there already
	default:
		err = fmt.Errorf("an action of cyclonus that is not known: %+v", a)
	}
	w.Resources = r
	return err
}

func (w *world) remove(namespace, name string) {
	var left []*networkingv1.NetworkPolicy
	for _, p := range w.policies {
		if p.Namespace != namespace || p.Name != name {
			left = append(left, p)
		}
	}
	w.policies = left
}

func (w *world) probe(name string, config *generator.ProbeConfig) (Case, error) {
	b, err := begin(name, w.policies)
	if err != nil {
		return Case{}, err
	}
	apps := map[string]address.AppID{}
	for _, p := range w.Pods {
		apps[p.PodString().String()] = b.app(p, w.Namespaces[p.Namespace])
	}
	for _, job := range (&probe.JobBuilder{}).GetJobsForProbeConfig(w.Resources, config).Valid {
		if err := b.ask(job.Traffic(), apps[job.FromKey], apps[job.ToKey]); err != nil {
			return Case{}, err
		}
	}
	return b.Case, nil
}
