package main

import (
	"fmt"
	"go/ast"
	"path"
	"regexp"
	"slices"
	"strings"
)

// kind is what an identifier names.
type kind string

const (
	anything   kind = "identifier"
	typeName   kind = "type"     // in C a struct, union or enum
	function   kind = "function" // or method
	member     kind = "field"
	packaged   kind = "package"
	sourceFile kind = "file"
)

// oldName is an identifier that we replaced. A word that is common elsewhere is only banned in some folders, or for
// some kinds of identifiers.
type oldName struct {
	name, better string
	kinds        []kind // all if empty
	below        string // folder; everywhere if empty
}

// cNames are banned in bpf/.
var cNames = []oldName{
	// tables.h
	{"source", "ep_src", []kind{typeName}, ""},
	{"local", "ep_dst", []kind{typeName}, ""},
	{"plug", "dev_ep", []kind{typeName}, ""},
	{"NETWORK_TAPPED", "NETWORK_OVS", nil, ""},
	// session.h, sessions.h
	{"moment", "pkt_info", nil, ""},
	{"outcome", "ct_result", []kind{typeName}, ""},
	{"turn", "ct_ctx", nil, ""},
	{"position", "ct_slot", []kind{typeName}, ""},
	{"worth", "evict_class", nil, ""},
	{"losers", "evicted_eps", nil, ""},
	{"visit", "ct_lookup_bucket", []kind{function}, ""},
	{"place", "ct_insert", []kind{function}, ""},
	{"sweep", "ct_expire_bucket", []kind{function}, ""},
	{"step", "ct_update", []kind{function}, ""},
	{"is_crowded", "over_quota", nil, ""},
	{"said_of", "pre_verdict", nil, ""},
	{"begins", "is_tcp_syn", []kind{function}, ""},
	{"adopt", "pickup", nil, ""},
	// police.h
	{"desk", "pol_scratch", nil, ""},
	{"judging", "enforce_mode", nil, ""},
	{"decide", "ct_verdict", []kind{function}, ""},
	{"examine", "policy_slow", []kind{function}, ""},
	{"judge_packet", "policy_check", nil, ""},
	{"police", "policy_enforce", []kind{function}, ""},
	{"is_settled", "policy_fast_hit", nil, ""},
	{"consult", "policy_lookup", nil, ""},
	// rules.h
	{"ends", "flow_tuple", []kind{typeName}, ""},
	{"subject", "pol_target", []kind{typeName}, ""},
	{"block", "cidr", []kind{typeName}, ""},
	{"ruling", "rule_verdict", []kind{typeName}, ""},
	{"way", "flow_egress, ct_dir or crypt_op", []kind{typeName}, ""},
	{"way_of", "ct_dir", []kind{typeName}, ""},
	// nimitz
	{"journey", "pkt_ctx", nil, ""},
	{"look", "parse_any", []kind{function}, ""},
	{"take_hop", "dec_ttl", nil, ""},
	{"find_speaker", "icmp_err_set_src", nil, ""},
	{"speak_for_peer", "icmp_err_set_src", nil, ""},
	{"foreign", "remote_sender", []kind{typeName}, ""},
	{"to_tapped", "ovs_port_egress", nil, ""},
	// the rest
	{"judged_mark", "accept_mark", nil, ""},
	{"SELDOM", "__slowpath", nil, ""},
	{"frame", "eth_ip6", []kind{typeName}, ""},
	{"speaks_for_node", "spoofs_vtep", nil, ""},
	{"answer.h", "icmp_error.h", []kind{sourceFile}, ""},
	{"nimitz_answer.h", "icmp_error.h", []kind{sourceFile}, ""},
	{"edge.h", "host_if.h", []kind{sourceFile}, ""},
	{"guard.h", "macvlan_backstop.h", []kind{sourceFile}, ""},
	{"police.h", "policy.h", []kind{sourceFile}, ""},
}

// goNames are banned as names of packages, types, functions, methods, fields, constants and variables of packages.
// Parameters and local variables are not checked.
var goNames = []oldName{
	{"together", "batch", []kind{packaged}, ""},
	{"spoil", "fuzzmutate", []kind{packaged}, ""},
	{"numeral", "humanize", []kind{packaged}, ""},
	{"reason", "dropreason", []kind{packaged}, ""},
	{"local", "unixrpc", []kind{packaged}, ""},
	{"keylock", "keymutex", []kind{packaged}, ""},
	{"observe", "debugserver or sdnotify", []kind{packaged}, ""},
	{"durable", "statefile", []kind{packaged}, ""},
	{"plugin", "cniclient", []kind{packaged}, ""},
	{"cni", "cniserver", []kind{packaged}, "internal"},
	{"follower", "agentprobe", []kind{packaged}, "internal/sim"},
	{"registrations", "chaos", []kind{packaged}, "test"},
	{"survive", "restart", []kind{packaged}, "test"},
	{"nexthop", "routing", []kind{packaged}, "test"},
	{"operations", "ops", []kind{packaged}, "test"},

	{"hear", "handleEvent", nil, ""},
	{"news", "update", nil, ""},
	{"policed", "tenantPolicy", []kind{typeName}, ""},
	{"surroundings", "compileInputs", nil, ""},
	{"told", "synced", nil, ""},
	{"policing", "policyQueue", []kind{typeName}, ""},
	{"Known", "TenantState", []kind{typeName}, ""},
	{"learn", "merge", []kind{function}, ""},
	{"unlearn", "rollback", []kind{function}, ""},
	{"carried", "transit", nil, ""},
	{"moving", "migration", nil, "internal/agent"},
	{"Question", "PolicyQuery", []kind{typeName}, "internal"},
	{"Answer", "PolicyVerdict", []kind{typeName}, "internal/agent"},
	{"Answer", "PolicyVerdict", []kind{typeName}, "internal/dpapi"},
	{"Remains", "StaleState", nil, ""},
	{"Leftover", "StaleState", []kind{typeName}, ""},
	{"given.go", "ipam_client.go", []kind{sourceFile}, "internal/agent"},

	{"Mapped", "MappingSink", []kind{typeName}, "internal/network"},
	{"Outward", "GatewayProvider", []kind{typeName}, "internal/network"},
	{"Dropping", "DropCounter", []kind{typeName}, "internal/network"},
	{"Working", "Runner", []kind{typeName}, "internal/network"},
	{"Switched", "SwitchInfo", []kind{typeName}, "internal/network"},
	{"Unpoliced", "PolicyGuard", []kind{typeName}, "internal/network"},
	{"Opener", "Factory", []kind{typeName}, "internal/network"},
	{"Path", "Dataplane", []kind{typeName}, "internal/network"},
	{"ErrUnfit", "ErrConflict", nil, ""},

	{"kind", "deviceDriver", []kind{typeName}, "internal/datapath"},
	{"pair", "pairDevice", []kind{typeName}, "internal/datapath"},
	{"inside", "containerNS", []kind{typeName}, "internal/datapath"},
	{"Taps", "OVSPorts", nil, "internal"},
	{"ruled", "mapSync", []kind{typeName}, "internal/datapath"},
	{"rulings", "policyMaps", nil, "internal/datapath"},
	{"Runs", "ProgStats", nil, "internal/datapath"},
	{"Void", "InvalidateFlows", nil, "internal/datapath"},
	{"visit", "forEachNetns", []kind{function}, "internal/datapath"},
	{"inherit", "migrateMaps", []kind{function}, "internal/datapath"},

	{"model", "cache", []kind{typeName}, "internal/orchestrator"},
	{"take", "applyEvent", []kind{function}, "internal/orchestrator"},
	{"tell", "broadcast", []kind{function}, "internal/orchestrator"},
	{"past", "history", []kind{member, typeName, function}, "internal/orchestrator"},
	{"forgotten", "compactedRev", []kind{member, typeName, function}, "internal/orchestrator"},
	{"follower", "subscriber", []kind{typeName}, "internal/orchestrator"},
	{"door", "connLimiter", nil, "internal/orchestrator"},
	{"guest", "limitedConn", []kind{typeName}, "internal/orchestrator"},
	{"settle", "reconcile", []kind{function}, "internal/orchestrator"},
	{"burden", "eventCost", nil, "internal/orchestrator"},
	{"changes", "committer", []kind{typeName}, "internal/orchestrator"},
	{"makeAll", "commitLoop", nil, "internal/orchestrator"},
	{"goLast", "requeueBack", nil, "internal/orchestrator"},
	{"rest", "quarantine", []kind{function, member}, "internal/orchestrator"},
	{"recall", "reclaim", []kind{function}, "internal/orchestrator"},
}

// banned finds the entry for an identifier in a file.
func banned(names []oldName, filePath, name string, is kind) (oldName, bool) {
	for _, old := range names {
		if old.name == name && is.among(old.kinds) && (old.below == "" || strings.HasPrefix(filePath, old.below+"/")) {
			return old, true
		}
	}
	return oldName{}, false
}

// among reports whether an entry with these kinds applies to k. An entry without kinds applies to all kinds except
// files and packages.
func (k kind) among(kinds []kind) bool {
	return slices.Contains(kinds, k) || len(kinds) == 0 && k != packaged && k != sourceFile
}

// checkIdentifiers finds identifiers that we replaced.
func checkIdentifiers(f file) (found []finding) {
	var names []oldName
	switch f.language {
	case golang:
		names = goNames
	case clang:
		names = cNames
	default:
		return nil
	}
	report := func(line int, name string, is kind) {
		if old, yes := banned(names, f.path, name, is); yes {
			text := fmt.Sprintf("%s %s is now %s", is, name, old.better)
			found = append(found, finding{f.path, line, "identifier", text})
		}
	}
	report(1, path.Base(f.path), sourceFile)
	if f.language == clang {
		cIdentifiers(f, report)
	} else {
		goIdentifiers(f, report)
	}
	return found
}

var (
	cToken = regexp.MustCompile(`[A-Za-z_]\w*|\S`)
	cWord  = regexp.MustCompile(`^[A-Za-z_]`)
)

// cIdentifiers reports each use of an identifier. After struct, union or enum it is a type, and before ( it is a
// function.
func cIdentifiers(f file, report func(int, string, kind)) {
	code, _ := splitC(string(f.text))
	before := ""
	for i, line := range strings.Split(code, "\n") {
		tokens := cToken.FindAllString(line, -1)
		for j, t := range tokens {
			if cWord.MatchString(t) {
				is := anything
				switch {
				case before == "struct" || before == "union" || before == "enum":
					is = typeName
				case j+1 < len(tokens) && tokens[j+1] == "(":
					is = function
				case before == "." || before == ">":
					is = member
				}
				report(i+1, t, is)
			}
			before = t
		}
	}
}

// goIdentifiers reports each declaration outside functions, and the name of the package.
func goIdentifiers(f file, report func(int, string, kind)) {
	set, tree := parseGo(f)
	if tree == nil {
		return
	}
	at := func(n *ast.Ident, is kind) { report(set.Position(n.Pos()).Line, n.Name, is) }
	at(&ast.Ident{NamePos: tree.Name.Pos(), Name: strings.TrimSuffix(tree.Name.Name, "_test")}, packaged)
	for _, d := range tree.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			at(d.Name, function)
		case *ast.GenDecl:
			for _, s := range d.Specs {
				switch s := s.(type) {
				case *ast.TypeSpec:
					at(s.Name, typeName)
				case *ast.ValueSpec:
					for _, n := range s.Names {
						at(n, anything)
					}
				}
			}
		}
	}
	ast.Inspect(tree, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.StructType:
			for _, field := range n.Fields.List {
				for _, name := range field.Names {
					at(name, member)
				}
			}
		case *ast.InterfaceType:
			for _, method := range n.Methods.List {
				for _, name := range method.Names {
					at(name, function)
				}
			}
		}
		return true
	})
}
