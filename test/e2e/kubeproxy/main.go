// Command kubeproxy writes the nftables rules of kube-proxy for services into the network namespace that it runs in, by
// kube-proxy's own code, and ends. It needs no API server. Benchmarks compare services with these rules.
package main

import (
	"context"
	"flag"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/tools/events"
	"k8s.io/kubernetes/pkg/proxy/nftables"
	proxyutil "k8s.io/kubernetes/pkg/proxy/util"
)

const node = "node"

type options struct {
	services             int
	first, backend, addr netip.Addr
	port, target         int
	nodePort             int
	pods                 string
}

func main() {
	var o options
	flag.IntVar(&o.services, "services", 1, "number of services")
	flag.TextVar(&o.first, "first", netip.MustParseAddr("fd00:73::1"), "address of the first service")
	flag.TextVar(&o.backend, "backend", netip.Addr{}, "endpoint of all services")
	flag.TextVar(&o.addr, "node", netip.Addr{}, "address of this node")
	flag.IntVar(&o.port, "port", 80, "port of the services")
	flag.IntVar(&o.target, "target", 80, "port of the endpoint, for the first service")
	flag.IntVar(&o.nodePort, "node-port", 0, "node port of the first service; 0: none")
	flag.StringVar(&o.pods, "pods", "", "prefix of pods, whose packets are not masqueraded; empty: any")
	flag.Parse()
	if err := run(o); err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}

func run(o options) error {
	if !o.backend.Is6() || !o.addr.Is6() {
		return fmt.Errorf("-backend and -node must be IPv6 addresses")
	}
	local := proxyutil.NewNoOpLocalDetector()
	if o.pods != "" {
		local = proxyutil.NewDetectLocalByCIDR(o.pods)
	}
	p, err := nftables.NewProxier(context.Background(), v1.IPv6Protocol, time.Hour, 0, false, 14, local, node,
		net.IP(o.addr.AsSlice()), events.NewFakeRecorder(100), nil, []string{o.addr.String() + "/128"}, false)
	if err != nil {
		return err
	}
	a := o.first
	for i := range o.services {
		target, nodePort := 80, 0
		if i == 0 {
			target, nodePort = o.target, o.nodePort
		}
		name := fmt.Sprint("s", i)
		p.OnServiceAdd(service(name, a, ports(i == 0, o.port, target, nodePort)))
		p.OnEndpointSliceAdd(slice(name, o.backend, ports(i == 0, o.port, target, nodePort)))
		a = a.Next()
	}
	p.OnServiceSynced()
	p.OnEndpointSlicesSynced() // writes the rules
	return check(o.services)
}

// ports returns a port of a service. The first service has it with UDP, too.
func ports(first bool, port, target, nodePort int) (all []v1.ServicePort) {
	protocols := []v1.Protocol{v1.ProtocolTCP}
	if first {
		protocols = append(protocols, v1.ProtocolUDP)
	}
	for _, protocol := range protocols {
		all = append(all, v1.ServicePort{
			Name: strings.ToLower(string(protocol)), Protocol: protocol, Port: int32(port),
			TargetPort: intstr.FromInt32(int32(target)), NodePort: int32(nodePort),
		})
	}
	return all
}

func service(name string, a netip.Addr, ports []v1.ServicePort) *v1.Service {
	cluster := v1.ServiceInternalTrafficPolicyCluster
	s := &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "bench", Name: name},
		Spec: v1.ServiceSpec{
			Type: v1.ServiceTypeClusterIP, ClusterIP: a.String(), ClusterIPs: []string{a.String()},
			IPFamilies: []v1.IPFamily{v1.IPv6Protocol}, InternalTrafficPolicy: &cluster,
			SessionAffinity: v1.ServiceAffinityNone, Ports: ports,
		},
	}
	if ports[0].NodePort != 0 {
		s.Spec.Type, s.Spec.ExternalTrafficPolicy = v1.ServiceTypeNodePort, v1.ServiceExternalTrafficPolicyCluster
	}
	return s
}

func slice(name string, backend netip.Addr, ports []v1.ServicePort) *discovery.EndpointSlice {
	s := &discovery.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "bench", Name: name + "-0", Labels: map[string]string{discovery.LabelServiceName: name},
		},
		AddressType: discovery.AddressTypeIPv6,
	}
	yes, no, other := true, false, "other"
	s.Endpoints = []discovery.Endpoint{{
		Addresses: []string{backend.String()}, NodeName: &other,
		Conditions: discovery.EndpointConditions{Ready: &yes, Serving: &yes, Terminating: &no},
	}}
	for _, p := range ports {
		port := p.TargetPort.IntVal
		s.Ports = append(s.Ports, discovery.EndpointPort{Name: &p.Name, Protocol: &p.Protocol, Port: &port})
	}
	return s
}

// check counts the written services, because the proxier only logs errors.
func check(services int) error {
	said, err := exec.Command("nft", "list", "map", "ip6", "kube-proxy", "service-ips").CombinedOutput()
	if err != nil {
		return fmt.Errorf("nft: %w: %s", err, said)
	}
	if is := strings.Count(string(said), " . tcp . "); is != services {
		return fmt.Errorf("kube-proxy has written %d services, want %d; its log has the reason", is, services)
	}
	return nil
}
