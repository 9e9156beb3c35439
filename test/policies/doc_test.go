// Package policies_test has policies in force in a lab, and real packets meet them. What is to arrive is judged by the matcher of
// cyclonus, an implementation that is not ours (internal/policy/policytest).
package policies_test
