package service

import (
	"encoding/json"
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"pilaster.io/pilaster/internal/fuzzmutate"
)

const goodManifests = `# comments only
---
apiVersion: v1
kind: Service
metadata:
  name: web
  namespace: shop
  labels: {team: a}
  annotations: {x: y}
  uid: abc
  finalizers: [a/b]
  selfLink: /x
spec:
  type: NodePort
  externalIPs: ["2001:db8:7::9"]
  externalTrafficPolicy: Local
  clusterIP: "fd70:696c:7300:1::5"
  clusterIPs: ["fd70:696c:7300:1::5"]
  ipFamilies: [IPv6]
  ipFamilyPolicy: PreferDualStack
  internalTrafficPolicy: Cluster
  selector: {app: web}
  sessionAffinity: ClientIP
  sessionAffinityConfig: {clientIP: {timeoutSeconds: 60}}
  publishNotReadyAddresses: true
  trafficDistribution: PreferClose
  ports:
  - {name: http, port: 80, targetPort: 8080, nodePort: 30080, appProtocol: http}
  - {name: dns, protocol: UDP, port: 53}
status: {loadBalancer: {}}
---
apiVersion: v1
kind: List
items:
- apiVersion: v1
  kind: Service
  metadata: {name: db}
  spec: {clusterIP: None, externalTrafficPolicy: Cluster, sessionAffinity: None, trafficDistribution: PreferSameNode}
- apiVersion: discovery.k8s.io/v1
  kind: EndpointSlice
  metadata: {name: db-1, labels: {kubernetes.io/service-name: db}}
  addressType: IPv6
  endpoints:
  - addresses: ["fd70::1"]
    targetRef: {kind: Pod, name: db-0}
  - addresses: ["fd70::2"]
    conditions: {ready: false}
  - addresses: ["fd70::3"]
    conditions: {ready: false, serving: true, terminating: true}
  - addresses: ["fd70::4"]
    conditions: {ready: false, serving: false, terminating: true}
`

func TestParseManifests(t *testing.T) {
	services, all, err := ParseManifests([]byte(goodManifests))
	if err != nil {
		t.Fatal(err)
	}
	wantServices := []Service{
		{
			Name: Name{"shop", "web"}, Address: netip.MustParseAddr("fd70:696c:7300:1::5"),
			Ports:    []Port{{"http", TCP, 80, 8080, 30080}, {"dns", UDP, 53, 53, 0}},
			Selector: map[string]string{"app": "web"}, Affinity: time.Minute, PublishNotReady: true,
			Distribution: PreferSameZone, NodePorts: true, TrafficPolicy: Local,
			ExternalIPs: []netip.Addr{netip.MustParseAddr("2001:db8:7::9")},
		},
		{Name: Name{"", "db"}, Headless: true, Distribution: PreferSameNode},
	}
	if !reflect.DeepEqual(services, wantServices) {
		t.Errorf("services\n%+v, want\n%+v", services, wantServices)
	}
	wantSlice := Slice{Service: Name{"", "db"}, Name: "db-1", Endpoints: sliceOf("/ 1 2- 3! 4-!").Endpoints}
	wantSlice.Endpoints[0].Name = "db-0"
	if len(all) != 1 || !reflect.DeepEqual(all[0], wantSlice) {
		t.Errorf("slices\n%+v, want\n%+v", all, wantSlice)
	}
}

// TestLoadBalancerManifests: a load balancer has node ports only if the document asks for them.
func TestLoadBalancerManifests(t *testing.T) {
	for text, want := range map[string]Service{
		"ports: [{port: 80}]": {},
		`ports: [{port: 80}], loadBalancerIP: "2001:db8:8::7"`: {
			LoadBalancerIP: netip.MustParseAddr("2001:db8:8::7"),
		},
		"ports: [{port: 80, nodePort: 30080}]":                      {NodePorts: true},
		"ports: [{port: 80}], allocateLoadBalancerNodePorts: true":  {NodePorts: true},
		"ports: [{port: 80}], allocateLoadBalancerNodePorts: false": {},
	} {
		all, _, err := ParseManifests([]byte("{apiVersion: v1, kind: Service, metadata: {name: web}, spec: " +
			"{type: LoadBalancer, " + text + "}}"))
		if err != nil || !all[0].LoadBalancer || all[0].LoadBalancerIP != want.LoadBalancerIP ||
			all[0].NodePorts != want.NodePorts {
			t.Errorf("%s: %+v, %v", text, all, err)
		}
	}
}

func TestRefusedManifests(t *testing.T) {
	const spec, slice = "apiVersion: v1\nkind: Service\nmetadata: {name: web}\nspec: ",
		"apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n" +
			"metadata: {name: a, labels: {kubernetes.io/service-name: web}}\n"
	for text, says := range map[string]string{
		"":                                                        "no service in it",
		"# nothing\n":                                             "no service in it",
		spec + "{ports: [{port: 80}\n":                            "document 1: ",
		"apiVersion: v1\nkind: Pod\n":                             `document 1: kind "Pod" of apiVersion "v1"`,
		"apiVersion: v1beta1\nkind: Service\n":                    `apiVersion "v1beta1": write kind Service of v1`,
		spec + "{ports: [{port: 80}], x: 1}":                      `document 1: Service web: unknown field "spec.x"`,
		spec + "{externalName: a.example}":                        "spec.externalName: Forbidden: not supported",
		spec + "{ports: [{port: 80, nodePort: 30080}]}":           "port 80/TCP has node port 30080, and the",
		spec + "{ports: [{port: 80, nodePort: 65536}]}":           "spec.ports[0].nodePort: Invalid value: 65536",
		spec + "{type: ExternalName, ports: [{port: 80}]}":        `spec.type: Unsupported value: "ExternalName"`,
		spec + "{ports: [{port: 80}], loadBalancerIP: 'fd12::1'}": "spec.loadBalancerIP: Forbidden",
		spec + "{type: LoadBalancer, ports: [{port: 80}], loadBalancerIP: x}": "spec.loadBalancerIP: Invalid value",
		spec + "{type: LoadBalancer, ports: [{port: 80, nodePort: 30080}], " +
			"allocateLoadBalancerNodePorts: false}": "port 80/TCP has node port 30080, and the",
		spec + "{ports: [{port: 80}], " +
			"allocateLoadBalancerNodePorts: true}": "only with type LoadBalancer",
		spec + "{ports: [{port: 80}], externalIPs: [a]}":             "spec.externalIPs[0]: Invalid value",
		spec + "{ports: [{port: 80}], externalIPs: [10.0.0.1]}":      "external address 10.0.0.1 is not a global",
		spec + "{ports: [{port: 80}], externalTrafficPolicy: Near}":  "spec.externalTrafficPolicy: Unsupported value",
		spec + "{ports: [{port: 0}]}":                                "spec.ports[0].port: Invalid value: 0",
		spec + "{ports: [{port: 65536}]}":                            "spec.ports[0].port: Invalid value: 65536",
		spec + `{ports: [{port: "80"}]}`:                             "spec.ports.port: a string is not valid here",
		spec + "{ports: [{port: 80, targetPort: 65616}]}":            "spec.ports[0].targetPort: Invalid value: 65616",
		spec + "{ports: [{port: 80, targetPort: http}]}":             `value: "http": must be a number: names`,
		spec + "{ports: [{port: 80, protocol: SCTP}]}":               "spec.ports[0].protocol: Unsupported value",
		spec + "{ports: [{port: 80}, {port: 81}]}":                   "document 1: service web: port 80/TCP has no",
		spec + "{ports: [{port: 80}], clusterIP: 10.0.0.1}":          "spec.clusterIP: Invalid value",
		spec + "{ports: [{port: 80}], clusterIPs: ['fd70::1']}":      "spec.clusterIPs[0]: Invalid value",
		spec + "{ports: [{port: 80}], ipFamilies: [IPv4, IPv6]}":     `spec.ipFamilies: Unsupported value: "IPv4"`,
		spec + "{ports: [{port: 80}], internalTrafficPolicy: Local}": "spec.internalTrafficPolicy: Unsupported",
		spec + "{ports: [{port: 80}], trafficDistribution: Near}":    "spec.trafficDistribution: Unsupported",
		spec + "{ports: [{port: 80}], sessionAffinityConfig: {clientIP: {timeoutSeconds: 1}}}": "only with " +
			"sessionAffinity ClientIP",
		spec + "{ports: [{port: 80}], sessionAffinity: ClientIP, sessionAffinityConfig: {clientIP: " +
			"{timeoutSeconds: 86401}}}": "clientIP.timeoutSeconds: Invalid value: 86401",
		spec + "{ports: [{port: 80}]}\n---\n" + spec + "{ports: [{port: 80}]}": "document 2: Service " +
			"web is also in document 1",
		slice + "addressType: IPv4\nendpoints: []":                 "addressType: Unsupported value",
		slice + "addressType: IPv6\nports: [{port: 80}]":           "ports: Forbidden",
		slice + "addressType: IPv6\nendpoints: [{}]":               "endpoints[0].addresses: Invalid value: 0",
		slice + "addressType: IPv6\nendpoints: [{addresses: [x]}]": "endpoints[0].addresses[0]: Invalid value",
		"apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {name: a}\naddressType: IPv6": "metadata." +
			"labels[kubernetes.io/service-name]: Required",
	} {
		if _, _, err := ParseManifests([]byte(text)); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s\n%v, want %s", text, err, says)
		}
	}
}

// TestUnsupportedFields: known fields of Kubernetes that have no effect here are refused, all at once, with what to do.
func TestUnsupportedFields(t *testing.T) {
	const text = `apiVersion: v1
kind: Service
metadata: {name: web}
spec: {ports: [{port: 80}], loadBalancerSourceRanges: ['2001:db8::/64'], healthCheckNodePort: 30100, externalName: null}
`
	const slice = `apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: a, labels: {kubernetes.io/service-name: web}}
addressType: IPv6
endpoints: [{addresses: ['fd70::1'], hostname: a, nodeName: n1, zone: null}]
`
	for text, want := range map[string]string{
		text: "document 1: Service web: spec.healthCheckNodePort: Forbidden: not supported: routers learn by BGP " +
			"which nodes to use; leave it out; spec.loadBalancerSourceRanges: Forbidden: not supported: use a " +
			"NetworkPolicy with an ipBlock; leave it out",
		slice: "document 1: EndpointSlice a: endpoints[0].hostname: Forbidden: not supported: endpoints have no DNS " +
			"names of their own; leave it out; endpoints[0].nodeName: Forbidden: not supported: fixed endpoints are " +
			"on no node; leave it out",
	} {
		if _, _, err := ParseManifests([]byte(text)); err == nil || err.Error() != want {
			t.Errorf("%s\n%v, want\n%s", text, err, want)
		}
	}
}

const goodService = `{"apiVersion":"v1","kind":"Service","metadata":{"name":"web","namespace":"shop"},"spec":` +
	`{"selector":{"app":"web"},"sessionAffinity":"ClientIP","sessionAffinityConfig":{"clientIP":` +
	`{"timeoutSeconds":1}},"ports":[{"name":"a","port":80,"targetPort":8080},{"name":"b","port":53,` +
	`"protocol":"UDP","nodePort":30053}],"type":"NodePort","externalIPs":["2001:db8:7::9"],` +
	`"externalTrafficPolicy":"Local"}}`

const goodBalancer = `{"apiVersion":"v1","kind":"Service","metadata":{"name":"web"},"spec":{"type":"LoadBalancer",` +
	`"loadBalancerIP":"2001:db8:8::7","allocateLoadBalancerNodePorts":true,"ports":[{"port":80}]}}`

const goodSlice = `{"apiVersion":"discovery.k8s.io/v1","kind":"EndpointSlice","metadata":{"name":"a","labels":` +
	`{"kubernetes.io/service-name":"web"}},"addressType":"IPv6","endpoints":[{"addresses":["fd70::1"],` +
	`"conditions":{"ready":true}},{"addresses":["fd70::2"]}]}`

// FuzzManifests: what is accepted is valid, survives the way through protobuf messages, and has the affinity that the
// document wants.
func FuzzManifests(f *testing.F) {
	for _, text := range []string{goodService, goodBalancer, goodSlice, goodManifests} {
		f.Add([]byte(text), fuzzmutate.Nothing)
	}
	f.Fuzz(func(t *testing.T, text, script []byte) {
		text = fuzzmutate.JSON(text, script, goodService, goodSlice)
		services, all, err := ParseManifests(text)
		if err != nil {
			if services != nil || all != nil {
				t.Fatalf("refused and read: %v", err)
			}
			return
		}
		for _, s := range services {
			again, err := FromProto(s.Proto())
			if err != nil || s.Check() != nil || !proto.Equal(again.Proto(), s.Proto()) {
				t.Fatalf("%+v, again %+v, %v, %v", s, again, err, s.Check())
			}
		}
		for _, s := range all {
			again, err := SliceFromProto(s.Proto())
			if err != nil || s.Check() != nil || !proto.Equal(again.Proto(), s.Proto()) {
				t.Fatalf("%+v, again %+v, %v, %v", s, again, err, s.Check())
			}
		}
		var is struct {
			Kind string `json:"kind"`
			Spec struct {
				SessionAffinity string `json:"sessionAffinity"`
			} `json:"spec"`
		}
		if json.Unmarshal(text, &is) == nil && is.Kind == "Service" && len(services) == 1 {
			if wants := is.Spec.SessionAffinity == "ClientIP"; wants != (services[0].Affinity > 0) {
				t.Fatalf("%s\nhas affinity %v", text, services[0].Affinity)
			}
		}
	})
}
