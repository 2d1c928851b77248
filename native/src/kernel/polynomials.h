// Written by tools/fit_polynomials.py.

// Q's coefficients, lowest first, then the limit; erf, then tanh.
alignas(64) constexpr float GELU_5[2][7] = {
    {0.395126361f, -0.0607235655f, 0.00701369841f, -0.000454634169f, 1.25105621e-05f, -1.94447931e-08f, 3.3f},  // largest error 1.9e-03
    {0.395680184f, -0.0616876293f, 0.00745418153f, -0.000536645503f, 1.93007531e-05f, -2.27483559e-07f, 3.3f},  // largest error 1.6e-03
};
alignas(64) constexpr float GELU_7[2][9] = {
    {0.398357637f, -0.0653324016f, 0.00917878877f, -0.000916193721f, 6.15850217e-05f, -2.59026499e-06f, 5.98974504e-08f, -5.58291709e-10f, 3.9f},  // largest error 2.0e-04
    {0.398560593f, -0.0659951734f, 0.00959144394f, -0.00102538989f, 7.67173933e-05f, -3.74303183e-06f, 1.05633119e-07f, -1.29700698e-09f, 3.9f},  // largest error 1.1e-04
};

// 2^f on [-1/2, 1/2], lowest first.
constexpr float EXP2_3[] = {0.999928074f, 0.693260986f, 0.242611122f, 0.0551716636f};
constexpr float EXP2_5[] = {1.00000007f, 0.693146967f, 0.240221197f, 0.0555071328f, 0.00967554133f, 0.00132764714f};
